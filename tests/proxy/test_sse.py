"""The event stream on the wire: framing, order, headers, errors, slow readers."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from tests.proxy.fakes import MODEL, FakeSession, Proxy, Reply, ended, eventually
from tests.waiting import PATIENCE
from tridentlm.errors import EngineDown, InternalError, Overloaded
from tridentlm_client import Delta, End

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def events_of(response: httpx.Response) -> list[Any]:
    """The decoded events; checks that there is nothing but whole `data:` events."""
    assert response.text.endswith("\n\n")
    events = response.text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event[6:]) for event in events[:-1]]


def stream(http: httpx.Client, path: str = CHAT, **body: Any) -> httpx.Response:
    asks = {"messages": USER} if path == CHAT else {"prompt": "x"}
    return http.post(path, json={**asks, "stream": True, **body})


def test_headers_let_no_one_buffer_or_cache(http: httpx.Client) -> None:
    response = stream(http)
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("req-")


def test_chat_events_are_role_then_text_then_reason(http: httpx.Client) -> None:
    events = events_of(stream(http))
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert [choice["index"] for choice in choices] == [0] * 4
    envelopes = [{k: v for k, v in event.items() if k != "choices"} for event in events]
    assert envelopes == [envelopes[0]] * 4
    assert envelopes[0]["object"] == "chat.completion.chunk"
    assert envelopes[0]["model"] == MODEL
    assert abs(envelopes[0]["created"] - time.time()) < 10


def test_completion_events_are_text_then_reason(http: httpx.Client) -> None:
    events = events_of(stream(http, "/v1/completions"))
    assert {event["object"] for event in events} == {"text_completion"}
    assert [event["choices"][0]["text"] for event in events] == ["Hello", " world", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_created_does_not_move_while_a_stream_runs(
    http: httpx.Client, session: FakeSession
) -> None:
    session.reply = lambda s: Reply(steps=[Delta("a", 1), 1.1, Delta("b", 1), ended()])
    assert len({event["created"] for event in events_of(stream(http))}) == 1


def test_held_back_text_gives_no_empty_event_but_counts(
    http: httpx.Client, session: FakeSession
) -> None:
    steps = [Delta("a", 1), Delta("", 1), Delta("", 1), Delta("é", 1), Delta("", 1), ended()]
    session.reply = lambda s: Reply(steps=steps)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(stream(http, "/v1/completions", stream_options=options))
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["a", "é", ""]
    assert [e["usage"]["completion_tokens"] for e in events[:2]] == [1, 4]


def test_first_output_without_text_still_opens_the_stream(
    http: httpx.Client, session: FakeSession
) -> None:
    session.reply = lambda s: Reply(steps=[Delta("", 1), 3600.0])
    with http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as response:
        first = next(response.iter_lines())
    assert '"role":"assistant"' in first


def test_an_end_without_any_text_is_a_whole_stream(
    http: httpx.Client, session: FakeSession
) -> None:
    session.reply = lambda s: Reply(steps=[ended(completion=1)])
    events = events_of(stream(http))
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {},
    ]


@pytest.mark.parametrize(
    "text", ['"quotes"\\', "line\nbreak\r\n\n", "😀 ไทย 한국어", "\x00\x1f\u2028"]
)
def test_any_text_survives(http: httpx.Client, session: FakeSession, text: str) -> None:
    session.reply = lambda s: Reply(steps=[Delta(text, 1), ended()])
    events = events_of(stream(http))
    assert events[1]["choices"][0]["delta"]["content"] == text


def test_usage_is_one_event_before_done_when_asked(http: httpx.Client) -> None:
    events = events_of(stream(http, stream_options={"include_usage": True}))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert [event["usage"] for event in events[:-1]] == [None] * 4
    assert all("usage" not in event for event in events_of(stream(http)))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_an_error_midway_is_an_event_and_done(
    http: httpx.Client, session: FakeSession, path: str
) -> None:
    failure = End.from_error(EngineDown("the engine process died"))
    session.reply = lambda s: Reply(steps=[Delta("Hel", 1), failure])
    response = stream(http, path)
    assert response.status_code == 200
    events = events_of(response)
    assert events[-1] == {
        "error": {
            "message": "the engine process died",
            "type": "server_error",
            "param": None,
            "code": "engine_down",
        }
    }
    finished = [e for e in events[:-1] if e["choices"][0]["finish_reason"] is not None]
    assert finished == []


def test_an_error_of_one_prompt_ends_its_neighbours_too(
    http: httpx.Client, session: FakeSession
) -> None:
    def reply(submission: Any) -> Reply:
        if submission.prompt == "bad":
            return Reply(steps=[0.05, End.from_error(InternalError("broke"))])
        return Reply(steps=[Delta("a", 1), 3600.0])

    session.reply = reply
    events = events_of(stream(http, "/v1/completions", prompt=["good", "bad"]))
    assert events[-1]["error"]["message"] == "broke"
    eventually(lambda: len(session.aborted) == 1)


def test_an_error_before_any_output_is_a_status(http: httpx.Client, session: FakeSession) -> None:
    session.reply = lambda s: Reply(steps=[End.from_error(Overloaded("no room"))])
    response = stream(http)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"


def test_status_waits_for_admission(http: httpx.Client, session: FakeSession) -> None:
    session.reply = lambda s: Reply(refusal=Overloaded("full"), admission=0.1)
    response = stream(http)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("steps", "event"), [([ended("abort")], False), (None, True)])
def test_a_timeout_is_504_or_an_error_event(
    http: httpx.Client, session: FakeSession, steps: list[Any] | None, event: bool
) -> None:
    session.reply = lambda s: Reply(steps=steps or [Delta("a", 1), ended("abort")])
    response = stream(http, timeout=0.5)
    assert session.submissions[-1].sampling["timeout"] == 0.5
    error = events_of(response)[-1]["error"] if event else response.json()["error"]
    assert response.status_code == (200 if event else 504)
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")


def test_every_event_has_a_write_of_its_own(proxy: Proxy) -> None:
    proxy.session.reply = lambda s: Reply(steps=[Delta(str(i), 1) for i in range(50)] + [ended()])
    body = json.dumps({"messages": USER, "stream": True}).encode()
    with _connect(proxy) as connection:
        connection.sendall(_post(body))
        raw = _read_until(connection, b"0\r\n\r\n")
    chunks = _chunks(raw.partition(b"\r\n\r\n")[2])
    assert all(chunk.startswith(b"data: ") and chunk.count(b"\n\n") == 1 for chunk in chunks)
    assert chunks[-1] == b"data: [DONE]\n\n"


def test_a_reader_that_lags_gets_everything_in_merged_events(proxy: Proxy) -> None:
    words = [f"{i:05d}" + "x" * 2000 for i in range(2000)]
    proxy.session.reply = lambda s: Reply(steps=[Delta(word, 1) for word in words] + [ended()])
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    with _connect(proxy) as connection:
        connection.sendall(_post(body, "/v1/completions"))
        eventually(lambda: [s.end for s in proxy.session.streams] not in ([], [None]))
        raw = _read_until(connection, b"0\r\n\r\n")
    chunks = _chunks(raw.partition(b"\r\n\r\n")[2])
    events = [json.loads(chunk[6:]) for chunk in chunks[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(words)
    assert len(events) < len(words), "nothing was merged: the reader never lagged"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_reader_that_leaves_while_it_lags_is_aborted(proxy: Proxy) -> None:
    steps = [Delta("x" * 10000, 1) for _ in range(2000)]
    proxy.session.reply = lambda s: Reply(steps=[*steps, 3600.0])
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    connection = _connect(proxy)
    connection.sendall(_post(body, "/v1/completions"))
    eventually(lambda: proxy.session.attended)
    time.sleep(0.5)
    connection.close()
    eventually(lambda: len(proxy.session.aborted) == 1)


def test_keep_alive_serves_the_next_request_on_the_connection(http: httpx.Client) -> None:
    for _ in range(3):
        assert len(events_of(stream(http))) == 4
    assert http.post(CHAT, json={"messages": USER}).json()["object"] == "chat.completion"


def _connect(proxy: Proxy) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = proxy.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    connection.settimeout(PATIENCE)
    return connection


def _post(body: bytes, path: str = CHAT) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def _read_until(connection: socket.socket, end: bytes) -> bytes:
    data = bytearray()
    while not data.endswith(end):
        part = connection.recv(1 << 16)
        assert part, "the connection was cut"
        data += part
    return bytes(data)


def _chunks(raw: bytes) -> list[bytes]:
    chunks = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        chunks.append(raw[: int(size, 16)])
        raw = raw[int(size, 16) + 2 :]
    return [chunk for chunk in chunks if chunk]
