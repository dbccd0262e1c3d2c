"""The fields that say what an answer must look like: what of them reaches the engine, what is
refused, and what the official client's helpers make of the answers."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.proxy.fakes import MODEL, FakeSession, FakeText, Reply, ended
from tests.waiting import PATIENCE
from tridentlm_client import Delta

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
HERMES, THINKING = "{{ tools }}<tool_call>", "{{ tools }}<tool_call><think></think>"
NUMBERS = itertools.count()
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def says(session: FakeSession, text: str) -> None:
    session.reply = lambda s: Reply(steps=[*(Delta(c, 1) for c in text), ended("stop", len(text))])


def grammar_of(session: FakeSession) -> Any:
    return session.submissions[-1].sampling.get("grammar")


@pytest.fixture
def template(session: FakeSession, text: FakeText) -> str:
    """A chat template under a model's name of its own: what is known of one is kept by the name."""
    session.status = {**(session.status or {}), "model": f"structured-{next(NUMBERS)}"}
    text.template = HERMES
    return text.template


@pytest.mark.parametrize(
    ("field", "value", "grammar"),
    [
        ("response_format", {"type": "json_object"}, {"type": "json_object"}),
        ("response_format", json_schema(SCHEMA), {"type": "json_schema", "value": SCHEMA}),
        ("response_format", {"type": "text"}, None),
        ("structured_outputs", {"json": SCHEMA}, {"type": "json_schema", "value": SCHEMA}),
        (
            "structured_outputs",
            {"json": json.dumps(SCHEMA), "regex": None},
            {"type": "json_schema", "value": SCHEMA},
        ),
        ("structured_outputs", {"json_object": True}, {"type": "json_object"}),
        ("structured_outputs", {"json_object": False}, None),
        ("structured_outputs", {"regex": "[ab]+"}, {"type": "regex", "value": "[ab]+"}),
        ("structured_outputs", {"choice": ["a", "b"]}, {"type": "choice", "value": ["a", "b"]}),
        (
            "structured_outputs",
            {"grammar": 'root ::= "a"+'},
            {"type": "grammar", "value": 'root ::= "a"+'},
        ),
        ("guided_json", SCHEMA, {"type": "json_schema", "value": SCHEMA}),
        ("guided_regex", "[ab]+", {"type": "regex", "value": "[ab]+"}),
        ("guided_choice", ["a"], {"type": "choice", "value": ["a"]}),
        ("guided_grammar", 'start: "a"', {"type": "grammar", "value": 'start: "a"'}),
        ("guided_json", None, None),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, "/generate"])
def test_the_form_reaches_the_engine(
    http: httpx.Client, session: FakeSession, url: str, field: str, value: Any, grammar: Any
) -> None:
    prompt = {"messages": USER} if url == CHAT else {"prompt": "x"}
    response = http.post(url, json={**prompt, field: value, "stream": False})
    assert response.status_code == 200, response.text
    assert grammar_of(session) == grammar
    assert json.dumps(grammar_of(session)) == json.dumps(grammar), "the order of properties counts"
    assert "x-tridentlm-ignored-params" not in response.headers


@pytest.mark.parametrize(
    ("body", "param", "code", "named"),
    [
        ({"response_format": "json"}, "response_format", None, "json_object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", None, "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
            None,
            "schema",
        ),
        (
            {"response_format": json_schema({"properties": {"a": {"not": {}}}})},
            "response_format",
            "unsupported_keyword",
            "'not' at /properties/a",
        ),
        (
            {"response_format": json_schema({"type": "array", "uniqueItems": True})},
            "response_format",
            "unsupported_keyword",
            "uniqueItems",
        ),
        (
            {"response_format": json_schema({"type": "strin"})},
            "response_format",
            "invalid_grammar",
            "strin",
        ),
        (
            {"response_format": json_schema({"enum": ["x" * 70_000]})},
            "response_format",
            "invalid_grammar",
            "65536",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "invalid_grammar", "("),
        (
            {"structured_outputs": {"regex": "a(?=b)"}},
            "structured_outputs",
            "invalid_grammar",
            "look",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "invalid_grammar", "choice"),
        ({"structured_outputs": {"grammar": "?"}}, "structured_outputs", "invalid_grammar", "GBNF"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", None, "JSON"),
        ({"structured_outputs": 3}, "structured_outputs", None, "object"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "unsupported_parameter",
            "structural_tag",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            None,
            "regex, choice",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "response_format",
            None,
            "guided_regex and response_format",
        ),
        ({"guided_json": {"if": {}}}, "guided_json", "unsupported_keyword", "'if'"),
        ({"tools": [tool()], "tool_choice": "some"}, "tool_choice", None, "required"),
        ({"tool_choice": "required"}, "tool_choice", None, "tools"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            None,
            "'f'",
        ),
        (
            {"tools": [tool(parameters={"not": {}}, strict=True)]},
            "tools",
            "unsupported_keyword",
            "get_weather",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_held_to_is_refused_before_the_engine_hears_of_it(
    http: httpx.Client,
    session: FakeSession,
    template: str,
    body: dict[str, Any],
    param: str,
    code: str | None,
    named: str,
    stream: bool,
) -> None:
    response = http.post(CHAT, json={"messages": USER, "stream": stream, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert session.submissions == []


class Weather(pydantic.BaseModel):
    city: str
    degrees: int | None = None


def test_the_parsing_helper_sends_a_schema_and_reads_the_answer(
    client: openai.OpenAI, session: FakeSession
) -> None:
    says(session, '{"city": "Paris", "degrees": 21}')
    answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Paris", degrees=21)
    schema = grammar_of(session)["value"]
    assert (schema["additionalProperties"], list(schema["properties"])) == (
        False,
        ["city", "degrees"],
    )


def test_the_streaming_helper_parses_as_it_comes(
    client: openai.OpenAI, session: FakeSession
) -> None:
    says(session, '{"city": "Paris", "degrees": 21}')
    with client.chat.completions.stream(
        model=MODEL, messages=USER, response_format=Weather
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == Weather(city="Paris", degrees=21)


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "expected"),
    [
        ("required", None, ["get_weather", "get_time"], {"required": True, "parallel": True}),
        ("required", False, ["get_weather", "get_time"], {"required": True, "parallel": False}),
        (NAMED, None, ["get_weather"], {"required": True, "parallel": False}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED] * 2}},
            False,
            ["get_weather"],
            {"required": True, "parallel": False},
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            None,
            ["get_weather"],
            {"required": False, "parallel": True},
        ),
    ],
)
def test_a_demanded_call_is_held_to_the_models_format(
    http: httpx.Client,
    session: FakeSession,
    template: str,
    choice: Any,
    parallel: bool | None,
    names: list[str],
    expected: dict[str, Any],
) -> None:
    says(
        session, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    tools = [tool(), tool("get_time")]
    body = {
        "messages": USER,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
    }
    response = http.post(CHAT, json=body)
    message = response.json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    grammar = grammar_of(session)
    assert (grammar["type"], grammar["value"]["format"]) == ("tool_calls", "hermes")
    assert [function["name"] for function in grammar["value"]["functions"]] == names
    assert {name: grammar["value"][name] for name in expected} == expected
    assert session.submissions[-1].chat_template_kwargs == {"tools": tools}


def test_only_strict_functions_have_a_grammar_for_their_arguments(
    http: httpx.Client, session: FakeSession, template: str
) -> None:
    http.post(CHAT, json={"messages": USER, "tools": [tool()]})
    assert grammar_of(session) is None
    tools = [tool(strict=True), tool("get_time")]
    response = http.post(CHAT, json={"messages": USER, "tools": tools})
    assert "x-tridentlm-ignored-params" not in response.headers
    value = grammar_of(session)["value"]
    assert not value["required"]
    assert [f["parameters"] for f in value["functions"]] == [CITY, {"type": "object"}]


def test_an_answer_is_of_the_form_or_calls(
    http: httpx.Client, session: FakeSession, template: str
) -> None:
    form = {"response_format": {"type": "json_object"}}
    http.post(CHAT, json={"messages": USER, "tools": [tool()], **form})
    grammar = grammar_of(session)
    assert grammar["type"] == "tool_calls"
    assert grammar["value"]["otherwise"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("prompt", "thoughts"),
    [("<think>\n", "open"), ("", "maybe"), ("<think>\n\n</think>\n\n", None)],
)
def test_the_form_begins_behind_the_thoughts(
    http: httpx.Client,
    session: FakeSession,
    text: FakeText,
    template: str,
    prompt: str,
    thoughts: str | None,
) -> None:
    text.template, text.generation_prompt = THINKING, prompt
    form = {"response_format": {"type": "json_object"}}
    assert http.post(CHAT, json={"messages": USER, **form}).status_code == 200
    assert grammar_of(session).get("thoughts") == thoughts


def test_responses_take_a_format_and_a_demanded_call(
    client: openai.OpenAI, session: FakeSession, template: str
) -> None:
    says(session, '{"city": "Paris", "degrees": null}')
    model = str((session.status or {})["model"])
    answer = client.responses.parse(model=model, input="Hi", text_format=Weather)
    assert answer.output_parsed == Weather(city="Paris")
    assert answer.text.format.type == "json_schema"
    assert grammar_of(session)["type"] == "json_schema"
    says(session, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
    flat = [{"type": "function", "name": name, "parameters": CITY} for name in ("a", "get_time")]
    choice = {"type": "function", "name": "get_time"}
    called = client.responses.create(model=model, input="Hi", tools=flat, tool_choice=choice)
    assert called.output[0].name == "get_time"
    assert [f["name"] for f in grammar_of(session)["value"]["functions"]] == ["get_time"]


def test_a_slow_grammar_holds_nobody_up(
    http: httpx.Client, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    checking, may_go = threading.Semaphore(0), threading.Event()

    def slow_check(*_: object) -> None:
        checking.release()
        assert may_go.wait(PATIENCE)

    monkeypatch.setattr("tridentlm.grammar.check", slow_check)
    slow = {"messages": USER, "response_format": {"type": "json_object"}}
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(http.post, CHAT, json=slow) for _ in range(3)]
        try:
            assert checking.acquire(timeout=PATIENCE)
            for _ in range(3):
                assert http.post(CHAT, json={"messages": USER}).status_code == 200
            assert not any(each.done() for each in waiting)
        finally:
            may_go.set()
        assert [each.result().status_code for each in waiting] == [200] * 3
