"""The parsers of tool calls and thoughts: every split of every text gives the same pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openai_proxy.output import OutputParser, message_of
from openai_proxy.reasoning import ReasoningParser
from openai_proxy.tools import TOOL_PARSERS, Piece, joined, parser_for_template
from tridentlm_client import Delta

NAMES = ("get_weather", "f")
ARGUMENTS = (
    '{"city": "Paris"}',
    "{}",
    '{"a": {"b": [1, {"c": "}"}]}, "d": "{\\"x\\": \\"</tool_call>\\"}"}',
    '{"text": "\\u00e9\\ud83d\\ude42 \\\\ \\" ]}{[;"}',
    '{"n": -1.5e3, "t": true, "z": null}',
)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
    return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]'


def mistral_new(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}{arguments}"


def mistral_args(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{arguments}"


FORMATS = {
    "hermes": [hermes],
    "llama3_json": [llama],
    "mistral": [mistral, mistral_new, mistral_args],
}
ODD: dict[str, list[str]] = {
    "hermes": [
        "plain text < with <tool and <tool_call",
        "Let me see.\n" + hermes("f", "{}") + "\n" + hermes("f", '{"a":1}') + "\nDone. ",
        '<tool_call>{"name": "f", "arguments": {"a": [1, 2',
        '<tool_call>{"name": "f", "argu',
        "<tool_call>no json</tool_call> after",
        '<tool_call>{"x": 1}</tool_call> after',
        '<tool_call>{"name": "f", "arguments": {"a": 1}} trailing',
        '<tool_call>{"name": "f", "arguments": {"a": 1} broken}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"id": 3, "name": "f", "arguments": {"a": 1}, "more": [{}]}</tool_call>',
        "<tool_call><tool_call>" + '{"name": "f", "arguments": {}}</tool_call></tool_call>',
        hermes("f", "{}") + "</tool",
        "  \n " + hermes("f", "{}") + " \n ",
        " \n no call \n ",
    ],
    "llama3_json": [
        "plain text",
        '{"answer": 5}',
        '{"name": "Bob", "parameters": {}}',
        '{"name": "f", "age": 5}',
        '  {"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        'Sure: <|python_tag|>{"type": "function", "name": "f", "parameters": {}} then',
        "<|python_tag|>print(1)",
        '{"name": "f", "parameters": {"a":',
        '{"name": "f"',
        '{"name": "f", "parameters": {}} and text',
        '{"name": "f", "parameters": {}};;{"x',
        "{",
        "",
    ],
    "mistral": [
        "plain [TOOL_CAL text",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "get_weather", "arguments": {}}] x',
        'Hm. [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather{"b": "[TOOL_CALLS]"}',
        "[TOOL_CALLS] what is it",
        "[TOOL_CALLS]" + "x" * 300 + "{}",
        "[TOOL_CALLS][1, 2]",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, 7]',
        '[TOOL_CALLS][{"x": 1}] y',
        '[TOOL_CALLS]f{"a": [',
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": [',
        '[TOOL_CALLS][{"name"',
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]",
    ],
}
THOUGHTS = [
    "<think>\nI must add.\n</think>\n\nThe sum is 12.",
    "no thoughts at all",
    "<think></think>x",
    "<think>cut in the mid",
    "<think> a < b </thin k> c",
    "\n <think>x</think>",
    "<thinker> is no mark",
    "thoughts that the prompt opened</think> and the answer </think>",
    "<thi",
    " \n",
    "",
]


def ids() -> Iterator[str]:
    return (f"id{i}" for i in itertools.count())


def parse(kind: str | None, parts: list[str], opened: bool | None = None) -> list[Piece]:
    """The pieces of a text that comes in `parts`, neighbours of one kind joined."""
    numbers = ids()
    tools = TOOL_PARSERS[kind](NAMES, numbers.__next__) if kind else None
    parser = OutputParser(None if opened is None else ReasoningParser(opened), tools)
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.push([Delta(part, 1)])
    pieces += parser.flush()
    return joined(pieces)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


TEXTS = [
    (kind, text)
    for kind, odd in ODD.items()
    for text in [*odd, *(make("f", a) for make in FORMATS[kind] for a in ARGUMENTS)]
]


@pytest.mark.parametrize(("kind", "text"), TEXTS)
def test_every_single_cut_and_every_character_alone_change_nothing(kind: str, text: str) -> None:
    whole = parse(kind, [text])
    assert parse(kind, list(text)) == whole
    for place in range(len(text) + 1):
        assert parse(kind, [text[:place], text[place:]]) == whole


SNIPPETS = {
    kind: st.one_of(
        st.text(max_size=8),
        st.sampled_from(odd),
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "{", "}"]
        ),
        st.builds(
            lambda make, a: make("f", a), st.sampled_from(FORMATS[kind]), st.sampled_from(ARGUMENTS)
        ),
    )
    for kind, odd in ODD.items()
}


@given(st.data())
def test_any_text_in_any_parts_gives_the_same_pieces(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(TOOL_PARSERS)))
    text = "".join(data.draw(st.lists(SNIPPETS[kind], max_size=5)))
    opened = data.draw(st.sampled_from([None, False, True]))
    places = data.draw(st.lists(st.integers(0, 10_000), max_size=12))
    assert parse(kind, cut(text, places), opened) == parse(kind, [text], opened)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("text", THOUGHTS)
def test_thoughts_do_not_depend_on_the_cut(text: str, opened: bool) -> None:
    whole = parse(None, [text], opened)
    assert parse(None, list(text), opened) == whole
    for place in range(len(text) + 1):
        assert parse(None, [text[:place], text[place:]], opened) == whole


@pytest.mark.parametrize(
    ("kind", "make"), [(kind, make) for kind, makers in FORMATS.items() for make in makers]
)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call_keeps_every_brace_of_its_arguments(kind: str, make, arguments: str) -> None:  # type: ignore[no-untyped-def]
    text = ("Let me look. " if kind != "llama3_json" else "") + make("get_weather", arguments)
    message = message_of(parse(kind, [text]))
    assert message["content"] == ("Let me look." if kind != "llama3_json" else None)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": arguments}
    json.loads(call["function"]["arguments"])


def test_several_calls_are_numbered_and_keep_the_text_around() -> None:
    message = message_of(parse("hermes", [ODD["hermes"][1]]))
    assert message["content"] == "Let me see.\nDone. "
    calls = [(c["id"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert calls == [("id0", "{}"), ("id1", '{"a":1}')]
    message = message_of(parse("llama3_json", [ODD["llama3_json"][4]]))
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f", "get_weather"]
    assert message["content"] is None
    message = message_of(parse("mistral", [ODD["mistral"][2]]))
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f", "get_weather"]
    assert message["tool_calls"][1]["function"]["arguments"] == '{"b": "[TOOL_CALLS]"}'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", "plain text < with <tool and <tool_call"),
        ("hermes", "<tool_call>no json</tool_call> after"),
        ("hermes", '<tool_call>{"x": 1}</tool_call> after'),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("hermes", " \n no call \n "),
        ("llama3_json", '{"answer": 5}'),
        ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] what is it"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("mistral", '[TOOL_CALLS][{"name"'),
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(kind: str, text: str) -> None:
    assert parse(kind, [text]) == [Piece("content", text)]


def test_a_cut_call_keeps_what_it_had() -> None:
    pieces = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": [1, 2'])
    assert [(p.kind, p.text) for p in pieces] == [("call", "f"), ("arguments", '{"a": [1, 2')]


def test_arguments_stream_as_they_come() -> None:
    parser = OutputParser(None, TOOL_PARSERS["hermes"](NAMES))
    parser.push([Delta('<tool_call>{"name": "f", "arguments": {"a', 1)])
    assert [p.text for p in parser.push([Delta('": 1', 1)])] == ['": 1']


def test_thoughts_and_answer_are_apart_and_thoughts_are_counted() -> None:
    parser = OutputParser(ReasoningParser(False), TOOL_PARSERS["hermes"](NAMES))
    parts = ["<think>", "\n", "a", " ", "b", "\n", "</think>", "\n\n", hermes("f", "{}")]
    pieces = [p for part in parts for p in parser.push([Delta(part, 1)])] + parser.flush()
    message = message_of(pieces)
    assert message["reasoning_content"] == message["reasoning"] == "a b"
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1
    assert parser.reasoning_tokens == 7


@pytest.mark.parametrize("marks", ["", "<think>"])
def test_a_prompt_that_opened_the_thoughts_is_gone_on_with(marks: str) -> None:
    message = message_of(parse(None, [marks + "Hm.</think>Yes"], opened=True))
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes")


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("... <tool_call>\\n{ ...", "hermes"),
        ("<tool_call><function=x>", None),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ('{"name": function name, "parameters": dictionary of', "llama3_json"),
        ("nothing", None),
    ],
)
def test_the_format_is_known_by_the_templates_marks(template: str, kind: str | None) -> None:
    assert parser_for_template(template) == kind
