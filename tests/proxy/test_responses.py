"""The Responses API as the official client uses it."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.proxy.fakes import (
    FOREVER,
    MODEL,
    FakeSession,
    FakeText,
    Proxy,
    Reply,
    ended,
    eventually,
    running_proxy,
)
from tests.proxy.test_disconnect import open_request
from tests.waiting import PATIENCE
from tridentlm.errors import InternalError
from tridentlm_client import Delta, End

RESPONSES = "/v1/responses"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


def says(session: FakeSession, *parts: str, reason: str = "stop") -> None:
    steps = [*(Delta(part, 1) for part in parts), ended(reason, len(parts))]
    session.reply = lambda s: Reply(steps=steps)


@pytest.fixture
def thinking(session: FakeSession, text: FakeText) -> FakeSession:
    session.status = {**(session.status or {}), "model": "thinking-responses"}
    text.template = "{{ tools }}<tool_call><think></think>"
    return session


def test_a_response_has_its_text_and_usage(client: openai.OpenAI, session: FakeSession) -> None:
    response = client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", max_output_tokens=9, metadata={"a": "b"}
    )
    assert response.output_text == "Hello world"
    assert response.id.startswith("resp_")
    assert (response.status, response.error, response.incomplete_details) == ("completed",) + (
        None,
    ) * 2
    assert response.usage.input_tokens == 5
    assert response.usage.output_tokens == 2
    assert response.usage.total_tokens == 7
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert response.metadata == {"a": "b"}
    submission = session.submissions[-1]
    assert submission.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert submission.sampling == {"max_tokens": 9}


def test_events_come_in_openais_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == "Hello world"
    assert events[0].response.status == "in_progress"
    assert events[2].item.content == []
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_streaming_helper_gets_the_final_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Hello world"


def test_thoughts_text_and_calls_are_items(client: openai.OpenAI, thinking: FakeSession) -> None:
    says(thinking, "<think>", "Hm", "</think>", "I look. ", *CALL)
    fields: dict[str, Any] = {"model": "thinking-responses", "input": "Weather?", "tools": [TOOL]}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        reasoning, message, call = response.output
        assert reasoning.content[0].text == "Hm"
        assert message.content[0].text == "I look."
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert json.loads(call.arguments) == {"city": "Paris"}
        assert call.call_id.startswith("call_")
        assert response.usage.output_tokens_details.reasoning_tokens == 3
        assert {item.status for item in response.output} == {"completed"}
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    )
    place = kinds.index("response.function_call_arguments.delta")
    assert kinds[place - 1] == "response.output_item.added"
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    nested = {k: v for k, v in TOOL.items() if k != "type"}
    sent = thinking.submissions[-1].chat_template_kwargs["tools"]
    assert sent == [{"type": "function", "function": nested}]


def test_the_clients_own_items_go_back_in(client: openai.OpenAI, thinking: FakeSession) -> None:
    says(thinking, "<think>Hm</think>", CALL)
    name = "thinking-responses"
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    first = client.responses.create(model=name, input=items, tools=[TOOL], store=False)
    items += first.output
    call = first.output[-1]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    says(thinking, "Sunny.")
    second = client.responses.create(model=name, input=items, tools=[TOOL])
    assert second.output_text == "Sunny."
    user, assistant, tool = thinking.submissions[-1].messages
    assert user == {"role": "user", "content": "Weather?"}
    assert assistant["reasoning_content"] == "Hm"
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert tool == {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}


def test_a_conversation_goes_on_by_the_previous_response(
    client: openai.OpenAI, session: FakeSession
) -> None:
    first = client.responses.create(model=MODEL, input="One", instructions="Once only.")
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    client.responses.create(model=MODEL, input="Three", previous_response_id=second.id)
    answer = {"role": "assistant", "content": "Hello world"}
    assert session.submissions[-1].messages == [
        {"role": "user", "content": "One"},
        answer,
        {"role": "user", "content": "Two"},
        answer,
        {"role": "user", "content": "Three"},
    ]


def test_a_stored_response_is_retrieved_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hi")
    assert client.responses.retrieve(made.id).output_text == "Hello world"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"


def test_a_streamed_response_is_stored_too(client: openai.OpenAI) -> None:
    last = list(client.responses.create(model=MODEL, input="Hi", stream=True))[-1]
    assert client.responses.retrieve(last.response.id).output_text == "Hello world"


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_the_length_makes_it_incomplete(client: openai.OpenAI, session: FakeSession) -> None:
    says(session, "Hel", reason="length")
    response = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    assert events[-1].type == "response.incomplete"


def test_a_background_response_is_asked_for_later(
    client: openai.OpenAI, session: FakeSession
) -> None:
    may_go = threading.Event()
    session.reply = lambda s: Reply(steps=[may_go.is_set, Delta("Done", 1), ended()])
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    assert made.status == "in_progress"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
    may_go.set()
    eventually(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.retrieve(made.id).output_text == "Done"
    assert client.responses.cancel(made.id).status == "completed"
    assert session.aborted == []


def test_a_background_response_is_cancelled(client: openai.OpenAI, session: FakeSession) -> None:
    session.reply = lambda s: Reply(steps=[Delta("Begun", 1), FOREVER])
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    eventually(lambda: client.responses.retrieve(made.id).output_text == "Begun")
    assert client.responses.cancel(made.id).status == "cancelled"
    assert len(session.aborted) == 1
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_a_background_response_is_deleted_while_it_runs(
    client: openai.OpenAI, session: FakeSession
) -> None:
    session.reply = lambda s: Reply(steps=[FOREVER])
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    client.responses.delete(made.id)
    assert len(session.aborted) == 1


def test_only_a_background_response_can_be_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)


def test_a_failure_is_an_event_and_is_stored(client: openai.OpenAI, session: FakeSession) -> None:
    failure = End.from_error(InternalError("it broke"))
    session.reply = lambda s: Reply(steps=[Delta("Hel", 1), 0.01, failure])
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "it broke"
    assert client.responses.retrieve(events[-1].response.id).status == "failed"
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    eventually(lambda: client.responses.retrieve(made.id).status == "failed")
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="Hi")


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_it(proxy: Proxy, session: FakeSession, stream: bool) -> None:
    session.reply = lambda s: Reply(steps=[Delta("x", 1), FOREVER])
    connection = open_request(proxy, RESPONSES, input="Hi", stream=stream)
    eventually(lambda: session.attended)
    connection.close()
    eventually(lambda: len(session.aborted) == 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"input": "x", "instructions": 3}, "instructions"),
        ({"input": "x", "metadata": 3}, "metadata"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "previous_response_id": 3}, "previous_response_id"),
        ({"input": "x", "background": True, "stream": True}, "background"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        (
            {
                "input": "x",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}},
            },
            "text.format",
        ),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": "x", "include": "message.output_text.logprobs"}, "include"),
        ({"input": "x", "include": [{}]}, "include"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        (
            {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 21},
            "top_logprobs",
        ),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "logprobs": True}, "logprobs"),
        ({"input": "x", "n": 2}, "n"),
    ],
)
def test_what_cannot_be_done_is_named(
    http: httpx.Client, session: FakeSession, body: dict[str, Any], param: str
) -> None:
    response = http.post(RESPONSES, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert session.submissions == []


def test_unknown_fields_are_named(http: httpx.Client) -> None:
    response = http.post(RESPONSES, json={"input": "x", "zeta": 1})
    assert response.headers["x-tridentlm-ignored-params"] == "zeta"


def test_the_oldest_go_when_there_are_too_many() -> None:
    with (
        running_proxy(max_stored_responses=2) as proxy,
        openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="x") as client,
    ):
        first, *rest = [client.responses.create(model=MODEL, input="Hi").id for _ in range(3)]
        for response_id in rest:
            assert client.responses.retrieve(response_id).id == response_id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first)


def test_without_a_store_nothing_is_promised() -> None:
    with running_proxy(max_stored_responses=0) as proxy:
        ask = {"input": "Hi"}
        made = httpx.post(proxy.url + RESPONSES, json=ask, timeout=PATIENCE).json()
        assert made["store"] is False
        for field in ({"store": True}, {"previous_response_id": "x"}, {"background": True}):
            response = httpx.post(proxy.url + RESPONSES, json=ask | field, timeout=PATIENCE)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(field))
        url = f"{proxy.url}{RESPONSES}/{made['id']}"
        assert httpx.get(url, timeout=PATIENCE).status_code == 400
