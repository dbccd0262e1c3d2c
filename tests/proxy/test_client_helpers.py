"""Every helper of the official client on every feature: all of them see the same answer.

create, .parse(), .stream(), chunks, with_raw_response, with_streaming_response; sync and async
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pydantic
import pytest

from tests.proxy.fakes import MODEL, Proxy, Reply, ended, running_proxy
from tridentlm_client import Delta, End

MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]


class City(pydantic.BaseModel):
    city: str


TOOL = openai.pydantic_function_tool(City, name="look")
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'
ENTRY = [0, [7, -0.5, 1, "Hi", None], [[7, -0.5, 1, "Hi", None], [8, -1.5, 2, "Ho", None]]]


@dataclass
class Feature:
    """`asked`: what a request says; `steps`: what the engine does; the rest: what must be seen."""

    steps: list[Delta | End]
    asked: dict[str, Any] = field(default_factory=dict)
    contents: list[str] = field(default_factory=lambda: ["Hello"])
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""
    reason: str = "stop"
    logprobs: list[str] = field(default_factory=list)
    usage: int = 2


def said(text: str) -> list[Delta | End]:
    return [*(Delta(char, 1) for char in text), ended("stop", len(text))]


HELLO = [Delta("He", 1), Delta("llo", 1), ended()]
FEATURES = {
    "text": Feature(HELLO),
    "choices": Feature(HELLO, {"n": 2}, contents=["Hello", "Hello"], usage=4),
    "stop": Feature([*HELLO[:2], ended(stop="!")], {"stop": ["!"]}),
    "sampling": Feature(
        HELLO,
        {
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 1,
            "presence_penalty": 0.1,
            "logit_bias": {"5": 1},
        },
    ),
    "logprobs": Feature(
        [Delta("Hi", 1, {"logprobs": [ENTRY]}), ended(completion=1)],
        {"logprobs": True, "top_logprobs": 2},
        contents=["Hi"],
        logprobs=["Hi"],
        usage=1,
    ),
    "call": Feature(
        said(CALL),
        {"tools": [TOOL]},
        contents=[""],
        calls=[("look", '{"city": "Paris"}')],
        reason="tool_calls",
        usage=len(CALL),
    ),
    "calls": Feature(
        said(f"Two. {CALL}\n{CALL}"),
        {"tools": [TOOL], "parallel_tool_calls": True},
        contents=["Two."],
        calls=[("look", '{"city": "Paris"}')] * 2,
        reason="tool_calls",
        usage=len(CALL) * 2 + 6,
    ),
    "demanded": Feature(
        said(CALL),
        {"tools": [TOOL], "tool_choice": "required"},
        contents=[""],
        calls=[("look", '{"city": "Paris"}')],
        reason="tool_calls",
        usage=len(CALL),
    ),
    "thoughts": Feature(
        said("<think>\nHm.\n</think>\n\nYes."), contents=["Yes."], reasoning="Hm.", usage=26
    ),
    "schema": Feature(
        said('{"city": "Paris"}'),
        {"response_format": City},
        contents=['{"city": "Paris"}'],
        usage=17,
    ),
}


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with running_proxy(tool_parser="hermes", reasoning_parser="think") as proxy:
        yield proxy


def check(feature: Feature, answer: Any) -> None:
    """`answer`: a ChatCompletion, however it was put together."""
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert [choice.message.content or "" for choice in answer.choices] == feature.contents
    for choice in answer.choices:
        assert choice.finish_reason == feature.reason
        assert choice.message.role == "assistant"
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == feature.calls
        assert len({call.id for call in calls}) == len(calls)
        thoughts = (choice.message.model_extra or {}).get("reasoning_content", "")
        assert thoughts == feature.reasoning
        told = choice.logprobs.content if choice.logprobs else []
        assert [entry.token for entry in told or []] == feature.logprobs
    assert answer.usage.completion_tokens == feature.usage


def check_parsed(feature: Feature, answer: Any) -> None:
    check(feature, answer)
    for choice in answer.choices:
        for call in choice.message.tool_calls or []:
            assert call.function.parsed_arguments == City(city="Paris")
        if "response_format" in feature.asked:
            assert choice.message.parsed == City(city="Paris")


def plain(feature: Feature) -> dict[str, Any]:
    """The request for helpers that take no types."""
    asked = {"model": MODEL, "messages": MESSAGES, **feature.asked}
    if asked.get("response_format") is City:
        schema = {"name": "City", "schema": City.model_json_schema(), "strict": True}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    return asked


def typed(feature: Feature) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **feature.asked}


def joined(chunks: list[Any]) -> Any:
    """The chunks of a stream put together as the client's own helper does."""
    from openai.lib.streaming.chat import ChatCompletionStreamState

    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    return state.get_final_completion()


WITH_USAGE = {"stream_options": {"include_usage": True}}
Helper = Callable[[Any, Feature], Awaitable[Any]]


async def _create(client: Any, feature: Feature) -> Any:
    return await client.chat.completions.create(**plain(feature))


async def _parse(client: Any, feature: Feature) -> Any:
    answer = await client.chat.completions.parse(**typed(feature))
    check_parsed(feature, answer)
    return answer


async def _stream(client: Any, feature: Feature) -> Any:
    async with client.chat.completions.stream(**typed(feature), **WITH_USAGE) as events:
        kinds = {event.type async for event in events}
        answer = await events.get_final_completion()
    assert "chunk" in kinds
    check_parsed(feature, answer)
    return answer


async def _chunks(client: Any, feature: Feature) -> Any:
    stream = await client.chat.completions.create(**plain(feature), **WITH_USAGE, stream=True)
    return joined([chunk async for chunk in stream])


async def _raw(client: Any, feature: Feature) -> Any:
    raw = await client.chat.completions.with_raw_response.create(**plain(feature))
    assert raw.headers["x-request-id"] == raw.request_id
    return raw.parse()


async def _raw_parse(client: Any, feature: Feature) -> Any:
    raw = await client.chat.completions.with_raw_response.parse(**typed(feature))
    answer = raw.parse()
    check_parsed(feature, answer)
    return answer


async def _raw_chunks(client: Any, feature: Feature) -> Any:
    raw = await client.chat.completions.with_raw_response.create(
        **plain(feature), **WITH_USAGE, stream=True
    )
    return joined([chunk async for chunk in raw.parse()])


async def _streaming_response(client: Any, feature: Feature) -> Any:
    async with client.chat.completions.with_streaming_response.create(**plain(feature)) as raw:
        return await raw.parse()


HELPERS: dict[str, Helper] = {
    "create": _create,
    "parse": _parse,
    "stream": _stream,
    "chunks": _chunks,
    "raw": _raw,
    "raw_parse": _raw_parse,
    "raw_chunks": _raw_chunks,
    "streaming_response": _streaming_response,
}


@pytest.mark.parametrize("name", FEATURES)
def test_every_asynchronous_helper_sees_the_same_answer(proxy: Proxy, name: str) -> None:
    feature = FEATURES[name]
    proxy.session.reply = lambda s: Reply(steps=feature.steps)

    async def run() -> None:
        url = f"{proxy.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            for helper in HELPERS.values():
                check(feature, await helper(client, feature))

    asyncio.run(run())


@pytest.mark.parametrize("name", FEATURES)
def test_every_helper_sees_the_same_answer(proxy: Proxy, name: str) -> None:
    feature = FEATURES[name]
    proxy.session.reply = lambda s: Reply(steps=feature.steps)
    url = f"{proxy.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        chat = client.chat.completions
        check(feature, chat.create(**plain(feature)))
        check_parsed(feature, chat.parse(**typed(feature)))
        with chat.stream(**typed(feature), **WITH_USAGE) as events:
            check_parsed(feature, events.get_final_completion())
        check(feature, joined(list(chat.create(**plain(feature), **WITH_USAGE, stream=True))))
        check(feature, chat.with_raw_response.create(**plain(feature)).parse())
        check_parsed(feature, chat.with_raw_response.parse(**typed(feature)).parse())
        raw = chat.with_raw_response.create(**plain(feature), **WITH_USAGE, stream=True)
        check(feature, joined(list(raw.parse())))
        with chat.with_streaming_response.create(**plain(feature)) as response:
            check(feature, response.parse())


@pytest.mark.parametrize("name", ["text", "thoughts", "calls", "schema", "demanded"])
def test_every_helper_of_responses_sees_the_same_answer(proxy: Proxy, name: str) -> None:
    feature = FEATURES[name]
    proxy.session.reply = lambda s: Reply(steps=feature.steps)
    asked: dict[str, Any] = {"model": MODEL, "input": "Weather?"}
    typed: dict[str, Any] = {}
    if name in ("calls", "demanded"):
        asked["tools"] = [{"type": "function", **TOOL["function"]}]
    if name == "demanded":
        asked["tool_choice"] = "required"
    if name == "schema":
        typed["text_format"] = City
    url = f"{proxy.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        answers = [client.responses.parse(**asked, **typed)]
        with client.responses.stream(**asked, **typed) as events:
            answers.append(events.get_final_response())
        if not typed:
            answers.append(client.responses.create(**asked))
            answers.append(client.responses.with_raw_response.create(**asked).parse())
            done = list(client.responses.create(**asked, stream=True))[-1]
            answers.append(done.response)
        for answer in answers:
            calls = [item for item in answer.output if item.type == "function_call"]
            assert [(call.name, call.arguments) for call in calls] == feature.calls
            assert answer.output_text == feature.contents[0]
            assert answer.usage.output_tokens == feature.usage
            assert answer.status == "completed"
            if typed:
                assert answer.output_parsed == City(city="Paris")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_helper_of_completions_and_models(proxy: Proxy, asynchronous: bool) -> None:
    proxy.session.reply = lambda s: Reply(steps=HELLO)
    asked: dict[str, Any] = {"model": MODEL, "prompt": "x"}
    url = f"{proxy.url}/v1"

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            whole = await client.completions.create(**asked)
            raw = (await client.completions.with_raw_response.create(**asked)).parse()
            chunks = [c async for c in await client.completions.create(**asked, stream=True)]
            names = [model.id async for model in client.models.list()]
            names.append((await client.models.retrieve(MODEL)).id)
            return [*texts(whole, raw), "".join(texts(*chunks))], names

    def texts(*answers: Any) -> list[str]:
        return [answer.choices[0].text for answer in answers]

    if asynchronous:
        found, names = asyncio.run(run())
    else:
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            whole = client.completions.create(**asked)
            raw = client.completions.with_raw_response.create(**asked).parse()
            chunks = list(client.completions.create(**asked, stream=True))
            found = [*texts(whole, raw), "".join(texts(*chunks))]
            names = [*(m.id for m in client.models.list()), client.models.retrieve(MODEL).id]
    assert found == ["Hello"] * 3
    assert names == [MODEL] * 2


def test_a_cut_answer_is_the_parsing_helpers_own_error(proxy: Proxy) -> None:
    proxy.session.reply = lambda s: Reply(steps=[*HELLO[:2], ended("length")])
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(**asked)
        assert client.chat.completions.create(**asked).choices[0].finish_reason == "length"


def test_errors_reach_every_helper_typed(proxy: Proxy) -> None:
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="x", max_retries=0) as client:
        chat = client.chat.completions
        wrong: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": -1}
        for helper in (chat.create, chat.parse, chat.with_raw_response.create):
            with pytest.raises(openai.BadRequestError) as caught:
                helper(**wrong)
            assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError), chat.stream(**wrong):
            raise AssertionError("it must not begin")
        assert json.loads(caught.value.response.text)["error"]["type"] == "invalid_request_error"
