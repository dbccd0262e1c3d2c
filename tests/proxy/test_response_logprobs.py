"""Log-probabilities of the Responses API: as a chat tells them, beside the text they belong to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseOutputText, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.proxy.fakes import MODEL, FakeSession, FakeText, Reply, ended
from tests.proxy.test_logprobs import HELLO, STEPS, entry, told
from tests.proxy.test_responses import CALL, RESPONSES, TOOL
from tridentlm_client import Delta

ASK: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The events as they are on the wire, each of which the client's own types take."""
    text = http.post(RESPONSES, json={"input": "Hi", "stream": True, **fields}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    for event in events:
        EVENT.validate_python(event)
    return events


def told_in(events: Sequence[dict[str, Any]]) -> list[Any]:
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    return [token for logprobs in deltas for token in logprobs]


def part_of(response: dict[str, Any]) -> dict[str, Any]:
    """The one text of a response, which the client's own types take."""
    Response.model_validate(response)
    [part] = [p for item in response["output"] for p in item.get("content", ()) if "logprobs" in p]
    ResponseOutputText.model_validate(part)
    return dict(part)


def test_they_are_those_of_a_chat_streamed_and_not(
    http: httpx.Client, client: openai.OpenAI, session: FakeSession
) -> None:
    session.reply = lambda submission: Reply(steps=STEPS)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    expected = [token.model_dump() for token in logprobs.content or ()]
    assert len(expected) == 4
    whole = http.post(RESPONSES, json={"input": "Hi", **ASK}).json()
    assert session.submissions[-1].sampling == {"logprobs": 2}
    assert whole["top_logprobs"] == 2
    assert part_of(whole)["logprobs"] == expected
    events = events_of(http, **ASK)
    assert told_in(events) == expected
    [done] = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == expected
    assert part_of(events[-1]["response"]) == part_of(whole)
    assert [e["part"]["logprobs"] for e in events if "part" in e] == [[], expected]


def test_each_delta_has_those_of_its_own_text(http: httpx.Client, session: FakeSession) -> None:
    session.reply = lambda submission: Reply(steps=STEPS)
    deltas = [e for e in events_of(http, **ASK) if e["type"] == "response.output_text.delta"]
    told = [(e["delta"], [token["token"] for token in e["logprobs"]]) for e in deltas]
    assert told == [("Hello", ["Hello"]), ("€", ["�", "�"]), ("", ["<end>"])]


def test_text_may_come_before_its_entry(http: httpx.Client, session: FakeSession) -> None:
    """As it does where the rest of a token's text is held back for a stop string."""
    steps = [told("Hel"), told("lo", HELLO), ended()]
    session.reply = lambda submission: Reply(steps=steps)
    part = part_of(http.post(RESPONSES, json={"input": "Hi", **ASK}).json())
    assert part["text"] == "Hello"
    assert [token["token"] for token in part["logprobs"]] == ["Hello"]
    events = events_of(http, **ASK)
    assert told_in(events) == part["logprobs"]


def test_the_streaming_helper_has_them_in_the_final_response(
    client: openai.OpenAI, session: FakeSession
) -> None:
    session.reply = lambda submission: Reply(steps=STEPS)
    with client.responses.stream(model=MODEL, input="Hi", **ASK) as stream:
        final = stream.get_final_response()
    [message] = final.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert [token.logprob for token in part.logprobs or ()] == [-0.5, -1.5, -0.125, -2.0]


def test_without_a_number_only_the_sampled_tokens_are_told(
    http: httpx.Client, session: FakeSession
) -> None:
    http.post(RESPONSES, json={"input": "Hi", "include": ASK["include"]})
    assert session.submissions[-1].sampling == {"logprobs": 0}
    http.post(RESPONSES, json={"input": "Hi", "include": [], "top_logprobs": 0})
    assert session.submissions[-1].sampling == {}


TOKENS = [
    *("<think>", "Hm", ", ", "so", "</think>", "\n\n", "I ", "look.", " ", "<tool"),
    *(CALL[5:], "<end>"),
]


def tokens_as_deltas(size: int) -> list[Delta]:
    """TOKENS with their entries, `size` to a delta; the last token has no text."""
    texts = [*TOKENS[:-1], ""]
    entries, at = [], 0
    for i, (token, text) in enumerate(zip(TOKENS, texts, strict=True)):
        entries.append(entry(at, [i, -float(i), 1, token, None]))
        at += len(text)
    return [
        Delta(
            "".join(texts[i : i + size]),
            len(entries[i : i + size]),
            {"logprobs": entries[i : i + size]},
        )
        for i in range(0, len(TOKENS), size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, len(TOKENS)])
def test_of_thoughts_and_calls_nothing_is_told(
    http: httpx.Client, session: FakeSession, text: FakeText, size: int
) -> None:
    session.status = {**(session.status or {}), "model": "thinking-logprobs"}
    text.template = "{{ tools }}<tool_call><think></think>"
    steps = [*tokens_as_deltas(size), ended("stop", len(TOKENS))]
    session.reply = lambda submission: Reply(steps=steps)
    whole = http.post(RESPONSES, json={"input": "Hi", "tools": [TOOL], **ASK}).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    part = part_of(whole)
    assert part["text"].strip() == "I look."
    told = [token["token"] for token in part["logprobs"]]
    assert "".join(told).strip() == "I look."
    events = events_of(http, tools=[TOOL], **ASK)
    assert told_in(events) == part["logprobs"]
