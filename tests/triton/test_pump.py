"""The pump: a prompt's log-probabilities leave in parts between the steps, and nothing is lost."""

from __future__ import annotations

import importlib
import queue
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.triton.test_plain import Client
from tests.triton.test_sessions import Numbers, Wire
from tests.waiting import wait_until
from tridentlm import tokenlog
from tridentlm.channel import Step
from tridentlm.config import EngineSettings
from tridentlm.core.extras import Logprobs
from tridentlm.core.plan import EngineStats, StepOutput
from tridentlm.core.request import FinishReason, SamplingParams
from tridentlm.protocol import MAX_UNACKED, Frame
from tridentlm.streams import TextStream
from tridentlm.tokenlog import TokenLog
from tridentlm.triton.ledger import Ledger
from tridentlm.triton.plain import PlainRequest, PlainSender
from tridentlm.triton.sessions import Session

STATS = EngineStats(1, 0, 1, 1, 0, 1, 0, 0, 0)
LONG, OTHER = 1, 2


class Process:
    """The engine process: what it says is put into `events`."""

    up = True

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def receive(self, timeout: float) -> Step | None:
        try:
            return self.events.get(timeout=timeout) if timeout else self.events.get_nowait()
        except queue.Empty:
            return None

    def abort(self, ids: list[int]) -> None:
        pass


class Unmeasured:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Texts(dict[int, "tuple[str, list[int] | None]"]):
    def __missing__(self, token_id: int) -> tuple[str, list[int] | None]:
        return f"{token_id} ", None


class Rig:
    """A pump, and two requests in it: LONG's prompt is told of, with a candidate beside each."""

    def __init__(self, pump: type) -> None:
        self.process, self.ledger = Process(), Ledger()
        self.pump = pump(
            EngineSettings(), self.ledger, self.process, Unmeasured(), lambda: {"up": True}
        )
        self.wire = Wire()
        self.ledger.open_session("s", self.wire)
        session = self.ledger.session("s")
        assert session is not None
        self.session: Session = session

    def enter(self, id: int, outlet: Any, prompt: int = 1, **params: Any) -> TextStream:
        sampling = SamplingParams(**params)
        ids = np.arange(prompt, dtype=np.int32)
        log = TokenLog.of(sampling, ids, Texts())  # type: ignore[arg-type]
        echo = ids.tolist() if sampling.echo else ()
        stream = TextStream(
            *(id, str(id), outlet, prompt, sampling, Numbers()),
            **{"arrived": 0.0, "keep_ids": False, "echo": echo, "log": log},
        )
        self.ledger.enter(("s", str(id)), stream, "")
        return stream

    def step(self, *rows: tuple[int, int], prompt: int = 0) -> None:
        """`rows`: request and FinishReason. With `prompt`, LONG's, of so many tokens, is told."""
        ids, finish = [id for id, _ in rows], [reason for _, reason in rows]
        told = None
        if prompt:
            positions = np.arange(1, prompt)
            told = Logprobs(
                ids=np.full(prompt - 1, LONG),
                positions=positions,
                tokens=np.stack([positions, positions], 1).astype(np.int32),
                values=np.stack([-positions, -positions], 1).astype(np.float32),
                ranks=np.ones(prompt - 1, np.int32),
            )
        output = StepOutput(
            np.array(ids, np.int64),
            np.full(len(rows), 7, np.int32),
            np.array(finish, np.uint8),
            cached=[(LONG, 0)] if prompt else [],
            logprobs=told,
        )
        self.process.events.put(Step(output, STATS))

    def told(self, name: str = "prompt_logprobs") -> list[list[Any]]:
        """LONG's entries, by frame."""
        return [f.extras[str(LONG)][name] for f in self.frames_with(name)]

    def frames_with(self, name: str) -> list[Frame]:
        return [f for f in list(self.wire.frames) if name in f.extras.get(str(LONG), {})]

    def ended(self) -> bool:
        return any(str(LONG) in frame.ends for frame in list(self.wire.frames))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    utils = types.ModuleType("triton_python_backend_utils")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.setattr(tokenlog, "PART_CANDIDATES", 8)
    made = Rig(importlib.import_module("tridentlm.triton.pump").Pump)
    yield made
    made.pump.close()
    for name in ("pump", "metrics"):
        del sys.modules[f"tridentlm.triton.{name}"]


def tokens(parts: list[list[Any]]) -> list[int]:
    return [entry[1][0] for part in parts for entry in part]


def test_parts_leave_between_steps_in_order_and_the_end_after_the_last(rig: Rig) -> None:
    rig.enter(LONG, rig.session, prompt=18, prompt_logprobs=1)
    rig.enter(OTHER, rig.session)
    rig.step((LONG, FinishReason.LENGTH), (OTHER, 0), prompt=18)
    for _ in range(8):
        rig.step((OTHER, 0))
    rig.pump.start()
    wait_until(rig.ended)
    assert [len(part) for part in rig.told()] == [4, 4, 4, 4, 2]
    assert tokens(rig.told()) == list(range(18))
    frames = list(rig.wire.frames)
    first, *_, last = (frames.index(frame) for frame in rig.frames_with("prompt_logprobs"))
    assert str(LONG) in frames[last].ends
    between = [f for f in frames[first + 1 : last] if str(OTHER) in f.uids]
    assert len(between) >= 3
    assert sum(frame.texts.count("7 ") for frame in frames if str(LONG) in frame.uids) >= 1


def test_a_short_prompts_come_with_the_first_token(rig: Rig) -> None:
    rig.enter(LONG, rig.session, prompt=4, prompt_logprobs=1)
    rig.step((LONG, FinishReason.LENGTH), prompt=4)
    rig.pump.start()
    wait_until(rig.ended)
    [frame] = [frame for frame in rig.wire.frames if frame.uids]
    assert (frame.texts, tokens(rig.told())) == (["7 "], [0, 1, 2, 3])


def test_an_echos_come_before_those_of_the_answer(rig: Rig) -> None:
    stream = rig.enter(LONG, rig.session, prompt=10, echo=True, logprobs=1)
    assert stream.log is not None
    stream.log.note(10, ([99, 99], [-1.0, -1.0], 1))
    rig.step((LONG, FinishReason.LENGTH), prompt=10)
    rig.pump.start()
    wait_until(rig.ended)
    assert tokens(rig.told("logprobs")) == [*range(10), 99]


def test_a_client_that_is_behind_gets_parts_only_as_it_takes_them(rig: Rig) -> None:
    prompt = 4 * (MAX_UNACKED + 10)
    stream = rig.enter(LONG, rig.session, prompt=prompt, prompt_logprobs=1)
    rig.step((LONG, FinishReason.LENGTH), prompt=prompt)
    rig.pump.start()
    wait_until(lambda: len(rig.wire.frames) == MAX_UNACKED)
    assert stream.log is not None
    assert len(stream.log.ready.get("prompt_logprobs", ())) <= 4
    assert not rig.ended()
    rig.session.acknowledge(MAX_UNACKED, time.monotonic())
    wait_until(rig.ended)
    assert max(map(len, rig.told())) == 4
    assert tokens(rig.told()) == list(range(prompt))


def test_a_closing_pump_tells_the_rest(rig: Rig) -> None:
    rig.enter(LONG, rig.session, prompt=4 * (MAX_UNACKED + 10), prompt_logprobs=1)
    rig.step((LONG, FinishReason.LENGTH), prompt=4 * (MAX_UNACKED + 10))
    rig.pump.start()
    wait_until(lambda: len(rig.wire.frames) == MAX_UNACKED)
    rig.pump.drain()  # nobody is taken to be behind any more
    wait_until(lambda: rig.wire.finished)
    assert rig.ended()
    assert tokens(rig.told()) == list(range(4 * (MAX_UNACKED + 10)))


def test_a_closed_session_is_owed_nothing(rig: Rig) -> None:
    prompt = 4 * (MAX_UNACKED + 10)
    rig.enter(LONG, rig.session, prompt=prompt, prompt_logprobs=1)
    rig.step((LONG, FinishReason.LENGTH), prompt=prompt)
    rig.pump.start()
    wait_until(lambda: len(rig.wire.frames) == MAX_UNACKED)
    rig.pump.close_session("s")
    wire = Wire()
    rig.ledger.open_session("t", wire)
    other = rig.ledger.session("t")
    assert other is not None
    rig.enter(OTHER, other)
    rig.step((OTHER, FinishReason.LENGTH))
    wait_until(lambda: any(str(OTHER) in frame.ends for frame in list(wire.frames)))
    assert not rig.ended()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_plain_client_gets_every_part_and_the_end_last(rig: Rig, streaming: bool) -> None:
    client, sender = Client(), PlainSender(lambda stream: None)
    outlet = PlainRequest(client, sender, streaming=streaming, relayed=False)
    outlet.stream = rig.enter(LONG, outlet, prompt=30, prompt_logprobs=1)
    sender.track(outlet)
    rig.step((LONG, FinishReason.LENGTH), prompt=30)
    rig.pump.start()
    wait_until(lambda: client.end is not None)
    assert tokens([part.get("prompt_logprobs", []) for part in client.told]) == list(range(30))
    assert "".join(client.texts) == "7 "
    sender.close()
