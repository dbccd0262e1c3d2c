"""Plain clients' sender: merging, the relay's window, heartbeats and cancelled clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.triton.test_sessions import Numbers
from tests.waiting import PATIENCE, wait_until
from tridentlm.core.request import FinishReason, SamplingParams
from tridentlm.errors import EngineDown, TridentError
from tridentlm.streams import TextStream
from tridentlm.triton import plain
from tridentlm.triton.plain import RELAY_WINDOW, PlainRequest, PlainSender


class Client:
    """The receiving end of one plain request. `gate` holds its sends up."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.told: list[dict[str, list[Any]]] = []
        self.end: dict[str, Any] | None = None
        self.error: TridentError | None = None
        self.beats = 0
        self.gone = False
        self.gate = threading.Event()
        self.gate.set()

    def send_output(
        self,
        text: str,
        ids: list[int],
        told: dict[str, list[Any]],
        end: dict[str, Any] | None,
        relay: str | None,
    ) -> None:
        self.gate.wait(PATIENCE)
        self.texts.append(text)
        self.told.append(told)
        self.end = end

    def send_heartbeat(self, relay: str) -> None:
        self.beats += 1

    def fail(self, error: TridentError) -> None:
        self.error = error

    def finish(self) -> None:
        raise AssertionError("the end rides on the last output")

    def is_cancelled(self) -> bool:
        return self.gone


class Rig:
    def __init__(self) -> None:
        self.aborted: list[TextStream] = []
        self.sender = PlainSender(self.aborted.append)

    def open(self, *, streaming: bool = True, relayed: bool = False) -> tuple[Client, TextStream]:
        client = Client()
        outlet = PlainRequest(client, self.sender, streaming=streaming, relayed=relayed)
        params = SamplingParams()
        stream = TextStream(1, "plain-1", outlet, 1, params, Numbers(), arrived=0.0, keep_ids=True)
        outlet.stream = stream
        self.sender.track(outlet)
        return client, stream


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.sender.close()


def feed(stream: TextStream, token: int, finish: int = 0) -> None:
    stream.feed(token, finish)
    stream.outlet.mark(stream)


def test_tokens_merge_while_a_send_is_under_way_and_none_is_lost(rig: Rig) -> None:
    client, stream = rig.open()
    client.gate.clear()
    for token in range(50):
        feed(stream, token)
    client.gate.set()
    feed(stream, 50, FinishReason.LENGTH)
    wait_until(lambda: client.end is not None)
    assert "".join(client.texts) == "".join(f"{i} " for i in range(51))
    assert len(client.texts) < 10


def test_without_streaming_there_is_exactly_one_response(rig: Rig) -> None:
    client, stream = rig.open(streaming=False)
    for token in range(5):
        feed(stream, token)
    time.sleep(0.05)
    assert client.texts == []
    feed(stream, 5, FinishReason.LENGTH)
    wait_until(lambda: client.end is not None)
    assert client.texts == ["0 1 2 3 4 5 "]


def test_an_error_before_any_output_is_tritons_own_error(rig: Rig) -> None:
    client, stream = rig.open()
    stream.fail(EngineDown("gone"))
    stream.outlet.mark(stream)
    wait_until(lambda: client.error is not None)
    assert isinstance(client.error, EngineDown)
    assert client.texts == []


def test_an_error_after_output_is_a_normal_last_response(rig: Rig) -> None:
    client, stream = rig.open()
    feed(stream, 1)
    wait_until(lambda: client.texts == ["1 "])
    stream.fail(EngineDown("gone"))
    stream.outlet.mark(stream)
    wait_until(lambda: client.end is not None)
    assert client.error is None
    assert client.end is not None
    assert client.end["error"]["message"] == "gone"


def test_relayed_responses_wait_while_the_relay_is_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "RELAY_SILENCE_SECONDS", 3600.0)
    client, stream = rig.open(relayed=True)
    rig.sender.passed(0)
    for token in range(3 * RELAY_WINDOW):
        feed(stream, token)
        time.sleep(0.0005)
    time.sleep(0.05)
    assert len(client.texts) <= RELAY_WINDOW
    rig.sender.passed(RELAY_WINDOW)
    feed(stream, 1, FinishReason.LENGTH)
    wait_until(lambda: client.end is not None)


def test_a_silent_relay_holds_nobody_up_for_ever(rig: Rig) -> None:
    client, stream = rig.open(relayed=True)
    for token in range(2 * RELAY_WINDOW):
        feed(stream, token)
        time.sleep(0.0005)
    feed(stream, 1, FinishReason.LENGTH)
    wait_until(lambda: client.end is not None)


def test_a_relayed_request_without_output_beats(rig: Rig) -> None:
    client, _ = rig.open(relayed=True)
    wait_until(lambda: client.beats >= 2)


def test_a_direct_client_that_has_gone_is_aborted(rig: Rig) -> None:
    client, stream = rig.open()
    client.gone = True
    wait_until(lambda: stream in rig.aborted)
