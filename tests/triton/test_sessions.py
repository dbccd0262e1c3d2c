"""Sessions: one frame for all news, merged for a slow client, moved between streams."""

from __future__ import annotations

from tridentlm.core.request import FinishReason, SamplingParams
from tridentlm.protocol import MAX_UNACKED, Frame
from tridentlm.streams import TextStream
from tridentlm.triton.sessions import Session


class Wire:
    """The sender of one stream, and what went over it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.finished = False

    def send_frame(self, frame: bytes) -> None:
        assert not self.finished
        self.frames.append(Frame.unpack(frame))

    def finish(self) -> None:
        self.finished = True

    def is_cancelled(self) -> bool:
        return False


class Numbers:
    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


def open_stream(session: Session, uid: str, *, keep_ids: bool = False) -> TextStream:
    params = SamplingParams()
    return TextStream(1, uid, session, 1, params, Numbers(), arrived=0.0, keep_ids=keep_ids)


def step(session: Session, *streams: TextStream, token: int = 1, finish: int = 0) -> None:
    for stream in streams:
        stream.feed(token, finish)
        session.mark(stream)
    session.flush()


def test_one_frame_a_step_carries_the_news_of_every_request() -> None:
    wire = Wire()
    session = Session("s", wire, 0.0)
    a, b = open_stream(session, "a"), open_stream(session, "b", keep_ids=True)
    step(session, a, b, token=5)
    step(session, b, token=6, finish=FinishReason.LENGTH)
    first, second = wire.frames
    assert first[:4] == (1, ["a", "b"], ["5 ", "5 "], [1, 1])
    assert first.extras == {"b": {"token_ids": [5]}}
    assert (second.seq, second.uids, second.texts) == (2, ["b"], ["6 "])
    assert second.ends["b"]["finish_reason"] == "length"


def test_nothing_is_sent_without_news() -> None:
    wire = Wire()
    session = Session("s", wire, 0.0)
    session.flush()
    assert wire.frames == []
    session.flush({"up": True})
    assert wire.frames[0].status == {"up": True}


def test_a_client_that_does_not_acknowledge_gets_merged_news_and_loses_none() -> None:
    wire = Wire()
    session = Session("s", wire, 0.0)
    stream = open_stream(session, "a")
    for token in range(1000):
        step(session, stream, token=token)
    assert len(wire.frames) == MAX_UNACKED
    session.acknowledge(MAX_UNACKED, 1.0)
    session.flush()
    assert len(wire.frames) == MAX_UNACKED + 1
    assert wire.frames[-1].counts == [1000 - MAX_UNACKED]
    everything = "".join(frame.texts[0] for frame in wire.frames)
    assert everything == "".join(f"{token} " for token in range(1000))


def test_a_draining_server_sends_all_without_acknowledgements() -> None:
    wire = Wire()
    session = Session("s", wire, 0.0)
    stream = open_stream(session, "a")
    for token in range(MAX_UNACKED + 5):
        step(session, stream, token=token)
    session.flush(draining=True)
    assert sum(frame.counts[0] for frame in wire.frames) == MAX_UNACKED + 5


def test_a_roll_moves_between_two_frames_and_ends_the_old_stream() -> None:
    old, new = Wire(), Wire()
    session = Session("s", old, 0.0)
    stream = open_stream(session, "a")
    step(session, stream, token=1)
    session.move_to(new, 0.0)
    assert not old.finished
    step(session, stream, token=2)
    assert old.finished
    assert [f.seq for f in old.frames] == [1]
    assert [f.seq for f in new.frames] == [2]


def test_the_end_of_a_session_ends_the_stream_it_was_about_to_move_to_as_well() -> None:
    old, new = Wire(), Wire()
    session = Session("s", old, 0.0)
    session.move_to(new, 0.0)
    session.finish()
    assert old.finished
    assert new.finished
