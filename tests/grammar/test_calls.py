"""Grammars of tool calls: whatever they let through, the parser of the format reads."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from openai_proxy.tools import TOOL_PARSERS, joined
from tests.grammar.walks import MARKS, accepts, matcher, walk
from tridentlm.errors import InvalidRequest

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"enum": [1, 2]}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"name": {"type": "string", "maxLength": 4}},
    },
    "get-time.2": {"properties": {"zone": {"const": 'a"b'}}, "additionalProperties": False},
    "nothing": None,
}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
KINDS = [
    ("hermes", ()),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("llama3_json", ()),
    ("mistral", ()),
    ("mistral", ("[TOOL_CALLS]",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
]
CALL = {
    "hermes": '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "nothing", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "nothing", "arguments": {}}]',
}


def one(format: str, specials: tuple[str, ...]) -> str:
    """A call as the format has it with these special tokens."""
    return "[TOOL_CALLS]nothing[ARGS]{}" if "[ARGS]" in specials else CALL[format]


def form(format: str, **fields: Any) -> dict[str, Any]:
    value = {"format": format, "functions": FUNCTIONS, "parallel": True, "required": True}
    return {"type": "tool_calls", "value": {**value, **fields}}


def read(format: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls."""
    parser = TOOL_PARSERS[format](list(SCHEMAS))
    pieces = joined([*parser.push(text), *parser.flush()])
    calls = []
    for call in pieces:
        if call.kind == "call":
            parts = (p.text for p in pieces if p.kind == "arguments" and p.nth == call.nth)
            calls.append((call.text, json.loads("".join(parts))))
    return "".join(piece.text for piece in pieces if piece.kind == "content"), calls


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name] or {"maxProperties": 0})


@pytest.mark.parametrize(("format", "specials"), KINDS)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_demanded_call_is_all_there_is(
    format: str, specials: tuple[str, ...], parallel: bool
) -> None:
    counts = set()
    for seed in range(20):
        text = walk(form(format, parallel=parallel), seed, specials)
        if text is not None:
            content, calls = read(format, text)
            assert (content, bool(calls)) == ("", True), text
            check(calls)
            counts.add(len(calls))
    assert counts
    assert parallel or counts == {1}


@pytest.mark.parametrize(("format", "specials"), KINDS)
def test_text_may_stand_before_or_instead_of_a_call_that_need_not_come(
    format: str, specials: tuple[str, ...]
) -> None:
    free = form(format, required=False)
    assert accepts(free, "Just text.", specials)
    assert accepts(free, "", specials)
    call = one(format, specials)
    assert accepts(free, call, specials)
    assert not accepts(free, call.replace("{}", '{"x": 1}'), specials)
    assert not accepts(free, call.replace("nothing", "unknown"), specials)
    if format != "llama3_json":
        assert accepts(free, f"Let me see.\n{call}", specials)
        assert not accepts(free, f"Let me see.\n{call[:-1]}", specials)
    for seed in range(20):
        text = walk(free, seed, specials)
        if text is not None:
            check(read(format, text)[1])


@pytest.mark.parametrize(("format", "specials"), [k for k in KINDS if k[0] != "llama3_json"])
def test_a_form_may_stand_instead_of_calls(format: str, specials: tuple[str, ...]) -> None:
    other = {"type": "json_schema", "value": {"type": "object", "required": ["x"]}}
    both = form(format, required=False, otherwise=other)
    assert accepts(both, '{"x": 1}', specials)
    assert accepts(both, one(format, specials), specials)
    assert not accepts(both, "text", specials)
    assert not accepts(both, '{"y": 1}', specials)
    assert not accepts(form(format, otherwise=other), '{"x": 1}', specials)


@pytest.mark.parametrize("format", sorted(CALL))
def test_thoughts_go_before_a_call(format: str) -> None:
    for specials in ((), MARKS[4:]):
        thinking = {**form(format), "thoughts": "open"}
        assert accepts(thinking, f"Hm.</think>\n{CALL[format]}", specials)
        assert not accepts(thinking, CALL[format], specials)


def test_calls_that_are_plain_json_leave_no_room_for_other_json() -> None:
    with pytest.raises(InvalidRequest, match="either"):
        matcher(form("llama3_json", required=False, otherwise={"type": "json_object"}))
