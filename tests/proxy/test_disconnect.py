"""A client that goes, in any state, streaming or not: its requests are aborted at once. And a
server that goes: its streams are finished, or ended with an error event."""

from __future__ import annotations

import socket
import time
from typing import Any

import orjson
import pytest

from tests.proxy.fakes import FOREVER, Proxy, Reply, ended, eventually, running_proxy
from tests.waiting import PATIENCE
from tridentlm_client import Delta

AT_ONCE = 5.0  # seconds; by themselves these requests would never end


def open_request(proxy: Proxy, path: str, **body: Any) -> socket.socket:
    host, port = proxy.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    content = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_gone_while_it_waits_for_admission(proxy: Proxy, stream: bool) -> None:
    session = proxy.session
    session.reply = lambda s: Reply(admission=FOREVER)
    connection = open_request(proxy, "/v1/completions", prompt="x", stream=stream)
    eventually(lambda: session.submissions)
    connection.close()
    eventually(lambda: session.cancelled == 1, AT_ONCE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [[FOREVER], [Delta("a", 1), Delta("b", 1), FOREVER]])
def test_gone_while_it_is_queued_or_generates(proxy: Proxy, stream: bool, steps: list[Any]) -> None:
    session = proxy.session
    session.reply = lambda s: Reply(steps=steps)
    connection = open_request(proxy, "/v1/completions", prompt=["x", "y"], stream=stream)
    eventually(lambda: session.attended)
    time.sleep(0.1)
    assert session.aborted == []
    connection.close()
    eventually(lambda: len(session.aborted) == 2, AT_ONCE)


def test_gone_while_it_sends_its_body(proxy: Proxy) -> None:
    host, port = proxy.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(head + b"content-length: 100\r\n\r\n{")
    time.sleep(0.05)
    connection.close()
    time.sleep(0.05)
    assert proxy.session.submissions == []


def test_a_finished_request_is_not_aborted(proxy: Proxy) -> None:
    for stream in (False, True):
        connection = open_request(proxy, "/v1/completions", prompt="x", stream=stream)
        read_until(connection, b"stop")
        connection.close()
    time.sleep(0.1)
    assert proxy.session.aborted == []


def test_a_hundred_disconnects_abort_exactly_their_own(proxy: Proxy) -> None:
    session = proxy.session
    steps = [step for i in range(200) for step in (Delta(f"{i} ", 1), 0.01)]
    session.reply = lambda s: Reply(steps=[*steps, FOREVER])
    connections = [
        open_request(proxy, "/v1/completions", prompt="x", stream=i % 2 == 0) for i in range(100)
    ]
    eventually(lambda: session.attended == 100)
    time.sleep(0.2)
    gone = connections[::3]
    for connection in gone:
        connection.close()
    eventually(lambda: len(session.aborted) == len(gone))
    time.sleep(0.2)
    assert len(session.aborted) == len(set(session.aborted)) == len(gone)
    for connection in connections:
        connection.close()
    eventually(lambda: len(set(session.aborted)) == 100)


def test_a_shutdown_waits_for_running_streams() -> None:
    with running_proxy() as proxy:
        proxy.session.reply = lambda s: Reply(steps=[Delta("a", 1), 0.5, Delta("b", 1), ended()])
        connection = open_request(proxy, "/v1/completions", prompt="x", stream=True)
        data = read_until(connection, b'"text":"a"')
        proxy.server.should_exit = True
        data += read_to_end(connection)
    assert b'"text":"b"' in data
    assert b"data: [DONE]\n\n" in data
    assert proxy.session.aborted == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_shutdown_that_lasts_too_long_ends_streams_with_an_error(stream: bool) -> None:
    with running_proxy(drain_seconds=1.0) as proxy:
        proxy.session.reply = lambda s: Reply(steps=[Delta("a", 1), FOREVER])
        connection = open_request(proxy, "/v1/completions", prompt="x", stream=stream)
        eventually(lambda: proxy.session.attended)
        data = read_until(connection, b'"text":"a"') if stream else b""
        proxy.server.should_exit = True
        data += read_to_end(connection)
    assert b'"code":"engine_down"' in data
    assert data.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
    assert (b"data: [DONE]\n\n" in data) == stream
    assert len(proxy.session.aborted) == 1


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        part = connection.recv(65536)
        assert part, "the connection ended"
        data += part
    return data


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    connection.close()
    return data
