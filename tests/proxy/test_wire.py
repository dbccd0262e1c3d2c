"""HTTP below the application: slow and odd clients, limits, what is never compressed."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from openai_proxy import httpserver
from tests.proxy.fakes import FakeSession, Proxy, Reply, ended
from tests.waiting import PATIENCE
from tridentlm_client import Delta

CHAT = "/v1/chat/completions"
LIMIT = 0.8  # seconds: enough for what is sent at once, on a busy machine too
BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'
HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % CHAT.encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@contextmanager
def connected(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> Iterator[socket.socket]:
    """A bare connection to a server that waits so long for a head, and for a body."""
    monkeypatch.setattr(httpserver, "HEAD_SECONDS", seconds)
    monkeypatch.setattr(httpserver, "BODY_SECONDS", seconds)
    where = urlsplit(proxy.url)
    with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as connection:
        yield connection


@pytest.fixture
def link(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with connected(proxy, monkeypatch, LIMIT) as connection:
        yield connection


def rest(link: socket.socket) -> bytes:
    """All that comes until the server closes, however it takes what was sent too late."""
    parts = []
    with suppress(ConnectionError):
        while data := link.recv(65536):
            parts.append(data)
    return b"".join(parts)


def answer(link: socket.socket) -> bytes:
    """One whole answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = link.recv(65536)
        assert part, "the connection was closed"
        data += part
    [length] = re.findall(rb"content-length: (\d+)", data)
    while len(data.partition(b"\r\n\r\n")[2]) < int(length):
        data += link.recv(65536)
    return data


def check_refusal(answer: bytes, status: int) -> None:
    """The whole `answer` is one error in the one shape, and says that the connection ends."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_connection_that_says_nothing_is_closed(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    with connected(proxy, monkeypatch, 0.3) as link:
        assert rest(link) == b""
    assert 0.3 <= time.monotonic() - began < 15  # 20 s are the default


@pytest.mark.parametrize("part", [b"P", b"\r\n", HEAD, HEAD + b"x-slow: "])
def test_a_head_that_does_not_come_is_408(link: socket.socket, part: bytes) -> None:
    link.sendall(part)
    check_refusal(rest(link), 408)


def test_a_head_in_drops_has_no_more_time_than_another(link: socket.socket) -> None:
    with suppress(OSError):  # once the server has closed
        link.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(40):
            time.sleep(LIMIT / 10)
            link.sendall(b"x-a: b\r\n")
        pytest.fail("a head of four times the limit was let in")
    check_refusal(rest(link), 408)


def test_a_body_that_does_not_come_is_408(link: socket.socket) -> None:
    link.sendall(HEAD + b"content-length: 100\r\n\r\n{")
    check_refusal(rest(link), 408)


def test_a_second_request_on_a_connection_is_limited_too(link: socket.socket) -> None:
    link.sendall(WHOLE)
    assert answer(link).startswith(b"HTTP/1.1 200")
    time.sleep(1.5 * LIMIT)
    link.sendall(WHOLE)
    assert answer(link).startswith(b"HTTP/1.1 200")
    link.sendall(HEAD)
    check_refusal(rest(link), 408)


def test_a_head_without_end_is_431(link: socket.socket) -> None:
    try:
        link.sendall(HEAD)
        for _ in range(64):
            link.sendall(b"x-long: " + b"a" * 2000 + b"\r\n")
    except OSError:
        pass  # the server has closed already: what it said is still to be read
    check_refusal(rest(link), 431)


def test_what_is_no_http_is_400_in_the_one_shape(link: socket.socket) -> None:
    link.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    check_refusal(rest(link), 400)


def test_an_answer_takes_longer_than_the_limits_of_a_request(
    link: socket.socket, session: FakeSession
) -> None:
    session.reply = lambda s: Reply(steps=[Delta("a", 1), 1.5 * LIMIT, Delta("b", 1), ended()])
    link.sendall(WHOLE)
    whole = answer(link)
    assert whole.startswith(b"HTTP/1.1 200")
    assert b'"content":"ab"' in whole


def test_an_offer_of_http2_is_answered_in_http1(link: socket.socket) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    whole = HEAD + offer + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    for cut in (0, 100, len(whole) - 20):
        link.sendall(whole[:cut])
        time.sleep(0.02 if cut else 0)
        link.sendall(whole[cut:])
        assert answer(link).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: Upgrade\r\n",
            200,
        ),
        (b"CONNECT somewhere:443 HTTP/1.1\r\nhost: x\r\n", 405),
    ],
)
def test_no_other_protocol_is_taken_up(link: socket.socket, head: bytes, status: int) -> None:
    link.sendall(head + b"\r\n")
    assert link.recv(65536).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_compressed(http: httpx.Client, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    answer = http.post(CHAT, json=body, headers={"accept-encoding": "gzip, deflate, br, zstd"})
    assert answer.status_code == 200
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_http_1_0_is_plain_text_up_to_the_end(
    link: socket.socket, stream: bool
) -> None:
    body = BODY[:-1] + b', "stream": %b}' % (b"true" if stream else b"false")
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
    link.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    head, _, text = rest(link).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head
    if stream:
        events = text.split(b"\n\n")
        assert events.pop() == b""
        assert all(event.startswith(b"data: ") for event in events)
        assert events[-1] == b"data: [DONE]"
    else:
        assert json.loads(text)["choices"][0]["message"]["content"] == "Hello world"
