from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_triton import STATUS, FakeTriton, accepted, end, run, text_of, until

from tridentlm_client import (
    InvalidRequest,
    Session,
    Stream,
    Submission,
    commands,
    link,
    submitter,
)


def test_it_is_ready_after_the_first_frame_and_the_engines_word() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        assert session.ready
        assert session.status is not None
        assert session.status["model"] == "fake"
        server.session.frame(status={"up": False, "draining": False})
        await until(lambda: not session.ready)
        server.session.frame(status={"up": True, "draining": True})
        await until(lambda: session.status == {"up": True, "draining": True})
        assert not session.ready
        assert await session.fetch_status() == STATUS

    run(test)


def test_a_submission_has_one_outcome_for_each_request_in_order() -> None:
    def accept(uid: str, body: Any) -> dict[str, Any]:
        if body["prompt"] == "bad":
            return {"uid": uid, "error": InvalidRequest("No.", param="prompt").payload()}
        return {"uid": uid, "prompt_tokens": len(body["prompt"])}

    async def test(server: FakeTriton, session: Session) -> None:
        server.accept = accept
        prompts = ["one", "bad", "three", "\ud800"]
        good, bad, third, broken = await session.submit([Submission(prompt=p) for p in prompts])
        assert isinstance(good, Stream)
        assert isinstance(third, Stream)
        assert (good.prompt_tokens, third.prompt_tokens) == (3, 5)
        assert isinstance(bad, InvalidRequest)
        assert (bad.message, bad.param) == ("No.", "prompt")
        assert isinstance(broken, InvalidRequest)
        [seen] = server.ops("submit")
        assert seen.parameters["session"] == server.session.id
        assert len(server.session.id) == 32

    run(test)


def test_a_burst_travels_in_few_requests() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        outcomes = await asyncio.gather(*(accepted(session, str(i)) for i in range(256)))
        assert len({stream.uid for stream in outcomes}) == 256
        requests = server.ops("submit")
        assert len(requests) == 256 // submitter.MAX_BATCH
        assert sum(len(seen.strings["uid"]) for seen in requests) == 256

    run(test)


def test_what_gathers_while_answers_are_awaited_is_sent_together_and_soon() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        server.hold_outcomes.clear()
        tasks = []
        for i in range(20):
            tasks.append(asyncio.create_task(accepted(session, str(i))))
            if i < submitter.MAX_UNANSWERED:  # these leave alone, the others gather at once
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        await until(lambda: len(server.ops("submit")) >= submitter.MAX_UNANSWERED + 1)
        assert len(server.ops("submit")) == submitter.MAX_UNANSWERED + 1
        server.hold_outcomes.set()
        await asyncio.gather(*tasks)

    run(test)


def test_frames_that_overtake_the_outcome_are_kept() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        server.hold_outcomes.clear()
        task = asyncio.create_task(accepted(session))
        await until(lambda: server.ops("submit"))
        uid = server.ops("submit")[0].strings["uid"][0].decode()
        server.session.frame((uid, "early "))
        server.session.frame((uid, "bird"), ends={uid: end()})
        await asyncio.sleep(0.05)
        server.hold_outcomes.set()
        assert await text_of(await task) == "early bird"

    run(test)


def test_read_returns_all_news_and_nothing_after_the_end() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        stream = await accepted(session, return_token_ids=True)
        uid = stream.uid
        reader = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        server.session.frame((uid, "a"), ("stranger", "x"), extras={uid: {"token_ids": [7]}})
        assert await reader == [("a", 1, {"token_ids": [7]})]
        server.session.frame((uid, "b"))
        server.session.frame((uid, "c"), ends={uid: end("length", 3, stop_reason="c")})
        await until(lambda: stream.end)
        assert await stream.read() == [("b", 1, None), ("c", 1, None)]
        assert await stream.read() == []
        assert stream.end is not None
        assert (stream.end.finish_reason, stream.end.stop_reason) == ("length", "c")
        assert stream.end.usage["completion_tokens"] == 3

    run(test)


def test_a_callback_comes_once_a_frame_after_the_frame_is_complete() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        stream, other = await accepted(session), await accepted(session)
        calls: list[tuple[list[str], bool]] = []
        stream.on_news = lambda: calls.append(
            ([delta.text for delta in stream.take()], stream.end is not None)
        )
        other.on_news = lambda: 1 / 0  # type: ignore[assignment]
        server.session.frame((other.uid, "x"), (stream.uid, "a"))
        server.session.frame((stream.uid, "b"), ends={stream.uid: end()})
        await until(lambda: len(calls) == 2)
        server.session.frame(ends={other.uid: end("abort")})
        await until(lambda: other.end)
        assert calls == [(["a"], False), (["b"], True)]

    run(test)


def test_leaving_a_stream_early_aborts_it_and_aborts_travel_together() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        server.answer = lambda body: ["word "] * 10_000
        one, two, three = [await accepted(session) for _ in range(3)]
        async with one, two:
            await one.read()
        await until(lambda: server.ops("abort"))
        assert server.ops("abort")[0].strings["uid"] == [two.uid.encode(), one.uid.encode()]
        async for _ in three:
            break
        await until(lambda: three.uid in server.session.aborted)
        last = await accepted(session)
        last.abort()
        assert await text_of(last) != ""
        assert last.end is not None
        assert last.end.finish_reason == "abort"

    run(test)


def test_a_cancelled_submission_is_aborted() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        server.hold_outcomes.clear()
        task = asyncio.create_task(session.submit([Submission(prompt="a"), Submission(prompt="b")]))
        await until(lambda: server.ops("submit"))
        task.cancel()
        uids = server.ops("submit")[0].strings["uid"]
        await until(lambda: server.session.aborted == {uid.decode() for uid in uids})
        server.hold_outcomes.set()
        assert isinstance(await accepted(session), Stream)

    run(test)


def test_every_sixteenth_frame_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ACK_SECONDS", 60.0)

    async def test(server: FakeTriton, session: Session) -> None:
        for _ in range(40):
            server.session.frame()
        await until(lambda: len(server.ops("ack")) == 2)
        first, second = server.ops("ack")
        assert [seen.parameters["seq"] for seen in (first, second)] == [16, 32]
        assert {seen.parameters["session"] for seen in (first, second)} == {server.session.id}
        assert first.stream is not server.ops("session")[0].stream

    run(test)


def test_no_request_follows_one_that_is_stuck_on_the_same_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton aborts when it refuses a request while another of the stream fails."""
    monkeypatch.setattr(link, "ACK_SECONDS", 60.0)
    monkeypatch.setattr(commands, "STUCK_SECONDS", 0.1)

    async def test(server: FakeTriton, session: Session) -> None:
        await accepted(session)
        server.is_stuck = True
        for _ in range(16):
            server.session.frame()
        await until(lambda: len(server.ops("ack")) == 1)
        await asyncio.sleep(0.2)
        await accepted(session)
        await accepted(session)
        [ack], (first, second, third) = server.ops("ack"), server.ops("submit")
        assert first.stream is ack.stream
        assert second.stream is third.stream is not ack.stream
        assert ack.stream.half_closed
        ack.stream.done()

    run(test)


def test_an_acknowledgement_is_sent_each_period_without_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "ACK_SECONDS", 0.1)
    monkeypatch.setattr(link, "TICK_SECONDS", 0.02)

    async def test(server: FakeTriton, session: Session) -> None:
        await until(lambda: len(server.ops("ack")) >= 3)
        assert {seen.parameters["seq"] for seen in server.ops("ack")} == {1}

    run(test)
