"""Tool calls and thoughts as the official client sees them, streaming and not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.proxy.fakes import MODEL, FakeSession, FakeText, Proxy, Reply, ended, running_proxy
from tests.waiting import PATIENCE
from tridentlm_client import Delta

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather in Paris?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_TEMPLATE = "{{ tools }}<tool_call>"
THINKING_TEMPLATE = "{{ tools }}<tool_call><think></think>"


def says(session: FakeSession, *parts: str, reason: str = "stop") -> None:
    steps = [*(Delta(part, 1) for part in parts), ended(reason, len(parts))]
    session.reply = lambda s: Reply(steps=steps)


@pytest.fixture
def hermes(http: httpx.Client, session: FakeSession) -> FakeSession:
    """The shared proxy in front of a model with Hermes' calls, under a name of its own: what is
    known of a template is kept by the model's name."""
    session.status = {**(session.status or {}), "model": "hermes"}
    return session


@pytest.fixture
def thinking(http: httpx.Client, session: FakeSession) -> FakeSession:
    session.status = {**(session.status or {}), "model": "thinking"}
    return session


@pytest.fixture(autouse=True)
def templates(text: FakeText, request: pytest.FixtureRequest) -> None:
    if "thinking" in request.fixturenames:
        text.template = THINKING_TEMPLATE
    elif "hermes" in request.fixturenames:
        text.template = HERMES_TEMPLATE


def test_a_whole_answer_has_the_call(client: openai.OpenAI, hermes: FakeSession) -> None:
    says(hermes, "Let me look.\n", *CALL)
    answer = client.chat.completions.create(model="hermes", messages=USER, tools=[TOOL])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert hermes.submissions[-1].chat_template_kwargs == {"tools": [TOOL]}


def test_deltas_name_a_call_once_and_then_its_arguments(
    client: openai.OpenAI, hermes: FakeSession
) -> None:
    says(hermes, "Hm. ", *CALL, "\n", *CALL)
    chunks = list(
        client.chat.completions.create(model="hermes", messages=USER, tools=[TOOL], stream=True)
    )
    deltas = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    named = [d for d in deltas if d.function.name is not None]
    assert [(d.index, d.type, d.function.name, d.function.arguments) for d in named] == [
        (0, "function", "get_weather", ""),
        (1, "function", "get_weather", ""),
    ]
    assert named[0].id != named[1].id
    rest = [d for d in deltas if d.function.name is None]
    assert all(d.id is None and d.type is None for d in rest)
    for index in (0, 1):
        text = "".join(d.function.arguments for d in rest if d.index == index)
        assert text == '{"city": "Paris"}'
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hm."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_streaming_helper_builds_the_call(client: openai.OpenAI, hermes: FakeSession) -> None:
    says(hermes, *CALL)
    options = {"include_usage": True}
    with client.chat.completions.stream(
        model="hermes", messages=USER, tools=[TOOL], stream_options=options
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    [call] = final.choices[0].message.tool_calls
    assert call.function.arguments == '{"city": "Paris"}'
    assert final.choices[0].message.content in (None, "")
    assert final.usage.completion_tokens == len(CALL)


class GetWeather(pydantic.BaseModel):
    city: str


def test_the_parsing_helper_gives_typed_arguments(
    client: openai.OpenAI, hermes: FakeSession
) -> None:
    says(hermes, CALL)
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.chat.completions.parse(model="hermes", messages=USER, tools=[tool])
    [call] = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_the_async_client_streams_calls(proxy: Proxy, hermes: FakeSession) -> None:
    says(hermes, *CALL)

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="x") as client:
            stream = await client.chat.completions.create(
                model="hermes", messages=USER, tools=[TOOL], stream=True
            )
            chunks = [chunk async for chunk in stream]
            calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
            return "".join(call.function.arguments for call in calls)

    assert asyncio.run(run()) == '{"city": "Paris"}'


def test_the_conversation_goes_on_with_the_tools_result(
    client: openai.OpenAI, hermes: FakeSession
) -> None:
    says(hermes, *CALL)
    answer = client.chat.completions.create(model="hermes", messages=USER, tools=[TOOL])
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    says(hermes, "It is sunny.")
    again = client.chat.completions.create(
        model="hermes", messages=[*USER, message, result], tools=[TOOL]
    )
    assert again.choices[0].message.content == "It is sunny."
    assert again.choices[0].finish_reason == "stop"
    sent = hermes.submissions[-1].messages
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert sent[2] == result


def test_an_answer_cut_by_its_length_says_so(client: openai.OpenAI, hermes: FakeSession) -> None:
    says(hermes, *CALL[:-20], reason="length")
    answer = client.chat.completions.create(model="hermes", messages=USER, tools=[TOOL])
    assert answer.choices[0].finish_reason == "length"
    assert CALL.find(answer.choices[0].message.tool_calls[0].function.arguments) > 0


def test_without_parallel_calls_only_the_first_is_passed_on(
    client: openai.OpenAI, hermes: FakeSession
) -> None:
    says(hermes, CALL, CALL)
    answer = client.chat.completions.create(
        model="hermes", messages=USER, tools=[TOOL], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice_none_keeps_the_tools_from_the_model(
    http: httpx.Client, hermes: FakeSession, stream: bool
) -> None:
    says(hermes, CALL)
    body = {"messages": USER, "tools": [TOOL], "tool_choice": "none", "stream": stream}
    response = http.post(CHAT, json=body)
    assert hermes.submissions[-1].chat_template_kwargs == {}
    assert "get_weather" in response.text
    assert "tool_calls" not in response.text


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("x", "tools"),
        ([3], "tools[0]"),
        ([{"type": "web_search"}], "tools[0]"),
        ([TOOL, {"type": "function"}], "tools[1].function"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": 3}}],
            "tools[0].function.parameters",
        ),
        ([TOOL] * 513, "tools"),
    ],
)
def test_bad_tools_are_refused_where_they_are(
    http: httpx.Client, hermes: FakeSession, tools: Any, param: str
) -> None:
    response = http.post(CHAT, json={"messages": USER, "tools": tools})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_template_without_a_known_format_refuses_tools(http: httpx.Client) -> None:
    response = http.post(CHAT, json={"messages": USER, "tools": [TOOL]})
    assert response.status_code == 400
    assert "--tool-parser" in response.json()["error"]["message"]


def test_tools_of_the_completions_endpoint_are_refused(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "x", "tools": [TOOL]})
    assert response.json()["error"]["param"] == "tools"


def test_the_operators_choice_goes_before_the_template() -> None:
    with running_proxy(tool_parser="mistral", reasoning_parser="none") as proxy:
        proxy.text.template = THINKING_TEMPLATE
        says(proxy.session, "<think>", '[TOOL_CALLS]get_weather{"city": "Rome"}')
        body = {"messages": USER, "tools": [TOOL]}
        answer = httpx.post(proxy.url + CHAT, json=body, timeout=PATIENCE).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == "<think>"
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
        assert proxy.session.submissions[-1].sampling["skip_special_tokens"] is False


THOUGHT = ["<think>", "\n", "2 + 2", " is 4", "\n", "</think>", "\n\n", "It is", " 4."]


def test_thoughts_are_apart_in_a_whole_answer(client: openai.OpenAI, thinking: FakeSession) -> None:
    says(thinking, *THOUGHT)
    answer = client.chat.completions.create(model="thinking", messages=USER)
    message = answer.choices[0].message
    assert message.content == "It is 4."
    assert message.model_extra["reasoning_content"] == "2 + 2 is 4"
    assert message.model_extra["reasoning"] == "2 + 2 is 4"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6


def test_thoughts_are_apart_in_a_stream(client: openai.OpenAI, thinking: FakeSession) -> None:
    says(thinking, *THOUGHT)
    chunks = list(
        client.chat.completions.create(
            model="thinking", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning_content", "reasoning"):
        thought = "".join((delta.model_extra or {}).get(name) or "" for delta in deltas)
        assert thought == "2 + 2 is 4"
    assert "".join(delta.content or "" for delta in deltas) == "It is 4."
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 6


def test_thoughts_that_the_prompt_opened_need_no_mark(
    client: openai.OpenAI, thinking: FakeSession, text: FakeText
) -> None:
    text.generation_prompt = "<|assistant|><think>\n"
    says(thinking, "Hm.", "</think>", "Yes.")
    extra = {"chat_template_kwargs": {"opened": True}}
    answer = client.chat.completions.create(model="thinking", messages=USER, extra_body=extra)
    assert answer.choices[0].message.model_extra["reasoning"] == "Hm."
    assert answer.choices[0].message.content == "Yes."


def test_thoughts_then_a_call(client: openai.OpenAI, thinking: FakeSession) -> None:
    says(thinking, *THOUGHT[:7], CALL)
    answer = client.chat.completions.create(model="thinking", messages=USER, tools=[TOOL])
    message = answer.choices[0].message
    assert message.content is None
    assert message.model_extra["reasoning"] == "2 + 2 is 4"
    assert len(message.tool_calls) == 1


def test_token_ids_and_running_usage_come_with_pieces_too(
    http: httpx.Client, thinking: FakeSession
) -> None:
    deltas = [Delta(part, 1, {"token_ids": [i]}) for i, part in enumerate(THOUGHT)]
    thinking.reply = lambda s: Reply(steps=[*deltas, ended("stop", len(deltas))])
    body = {"messages": USER, "stream": True, "return_token_ids": True}
    options = {"stream_options": {"continuous_usage_stats": True}}
    text = http.post(CHAT, json=body | options).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    ids = [i for event in events for i in event["choices"][0].get("token_ids", [])]
    assert ids == list(range(len(THOUGHT)))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(THOUGHT)


def test_what_is_known_of_a_template_is_asked_once(
    http: httpx.Client, session: FakeSession, text: FakeText
) -> None:
    session.status = {**(session.status or {}), "model": "asked-once"}
    for _ in range(3):
        http.post(CHAT, json={"messages": USER})
    assert [op for op, _ in text.asked] == ["describe"]
    for flag in (True, False, True):
        kwargs = {"enable_thinking": flag}
        http.post(CHAT, json={"messages": USER, "chat_template_kwargs": kwargs})
    assert len(text.asked) == 3


def test_a_comment_keeps_a_silent_stream_alive() -> None:
    with running_proxy(sse_keep_alive=0.05) as proxy:
        steps = [0.18, Delta("a", 1), 0.18, Delta("b", 1), ended()]
        proxy.session.reply = lambda s: Reply(steps=steps)
        body = {"messages": USER, "stream": True}
        lines = httpx.post(proxy.url + CHAT, json=body, timeout=PATIENCE).text.split("\n\n")
        place = next(i for i, line in enumerate(lines) if '"content":"a"' in line)
        assert lines[0] == ": keep-alive"
        assert lines[:place].count(": keep-alive") >= 2
        assert lines[place:].count(": keep-alive") >= 2
        with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="x") as client:
            chunks = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == "ab"
