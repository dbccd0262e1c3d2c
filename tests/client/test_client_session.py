from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_triton import STATUS, FakeTriton, end

from tests.waiting import PATIENCE
from tridentlm_client import (
    EngineDown,
    InvalidRequest,
    Session,
    Stream,
    Submission,
    TlsOptions,
    TridentError,
    link,
    rpc,
    submitter,
)
from tridentlm_client import session as session_module


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[FakeTriton, Session]]:
    server = FakeTriton()
    target = await server.start()
    try:
        async with Session(target) as session:
            yield server, session
    finally:
        await server.stop()


def run(test: Callable[[FakeTriton, Session], Awaitable[None]]) -> None:
    async def body() -> None:
        async with connected() as (server, session):
            await asyncio.wait_for(test(server, session), 2 * PATIENCE)

    asyncio.run(body())


async def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")


async def accepted(session: Session, prompt: str = "hi", **more: Any) -> Stream:
    [outcome] = await session.submit([Submission(prompt=prompt, **more)])
    assert isinstance(outcome, Stream), outcome
    return outcome


async def text_of(stream: Stream) -> str:
    return "".join([delta.text async for delta in stream])


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
        assert first.parameters == {"session": server.session.id, "seq": 16}
        assert second.parameters == {"session": server.session.id, "seq": 32}
        assert first.stream is not server.ops("session")[0].stream

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


def test_a_rolled_session_loses_nothing_and_its_old_streams_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "ROLL_FRAMES", 20)

    async def test(server: FakeTriton, session: Session) -> None:
        words = [f"{i} " for i in range(500)]
        server.answer = lambda body: words
        assert await text_of(await accepted(session)) == "".join(words)
        opened = server.ops("session")
        assert len(opened) > 5
        assert len({seen.parameters["session"] for seen in opened}) == 1
        await until(lambda: all(seen.stream.ended for seen in opened[:-1]))
        assert all(seen.stream.half_closed for seen in opened[:-1])
        assert not opened[-1].stream.half_closed
        commands = {id(seen.stream): seen.stream for seen in server.ops("ack")}
        assert len(commands) > 1
        await until(lambda: [stream.ended for stream in commands.values()].count(False) == 1)

    run(test)


def test_frames_of_a_new_stream_wait_for_the_old_streams_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "ROLL_FRAMES", 5)

    async def test(server: FakeTriton, session: Session) -> None:
        server.auto_roll = False
        stream = await accepted(session)
        fake = server.session
        while len(fake.streams) == 1:
            fake.frame((stream.uid, "a"))
            await asyncio.sleep(0.01)
        fake.frame((stream.uid, "b"))
        monkeypatch.setattr(rpc, "ROLL_FRAMES", 1000)
        fake.frame((stream.uid, "c"), ends={stream.uid: end()}, stream=fake.streams[1])
        await asyncio.sleep(0.1)
        assert stream.end is None
        fake.final()
        assert (await text_of(stream)).endswith("abc")

    run(test)


def test_a_gap_ends_the_streams_and_a_new_session_is_opened() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        stream = await accepted(session)
        old = server.session
        old.frame((stream.uid, "a"), skip=1)
        await until(lambda: stream.end)
        assert stream.end is not None
        assert isinstance(stream.end.error, EngineDown)
        with pytest.raises(EngineDown):
            await text_of(stream)
        assert not session.ready
        await until(lambda: session.ready)
        assert server.session.id != old.id
        assert [seen.parameters["session"] for seen in server.ops("close")] == [old.id]

    run(test)


def test_a_silent_server_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(link, "TICK_SECONDS", 0.05)

    async def test(server: FakeTriton, session: Session) -> None:
        stream = await accepted(session)
        old = server.session
        for _ in range(15):
            await asyncio.sleep(0.1)
            old.frame((stream.uid, "a"))
        assert stream.end is None
        await until(lambda: stream.end)
        await until(lambda: server.session is not old)
        await until(lambda: session.ready)

    run(test)


def test_a_drained_session_half_closes_both_streams_and_comes_back() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        stream = await accepted(session)
        old, streams = server.session, list(server.streams)
        assert len(streams) == 2
        server.refusal = "Request for unknown model: 'engine' has no available versions"
        old.final()
        assert await stream.read() == []
        assert stream.end is not None
        assert isinstance(stream.end.error, EngineDown)
        await until(lambda: all(s.half_closed and s.ended for s in streams))
        await until(lambda: len(server.streams) > 6)
        [outcome] = await session.submit([Submission(prompt="x")])
        assert isinstance(outcome, EngineDown)
        server.refusal = None
        await until(lambda: session.ready)
        assert server.session.id != old.id
        assert isinstance(await accepted(session), Stream)

    run(test)


def test_running_requests_finish_on_a_server_that_takes_no_new_ones() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        stream = await accepted(session)
        old = server.session
        server.refusal = "Request for unknown model: 'submit' has no available versions"
        [outcome] = await session.submit([Submission(prompt="late")])
        assert isinstance(outcome, EngineDown)
        assert not session.ready
        await until(lambda: all(s.half_closed for s in server.streams))
        old.frame((stream.uid, "all of it"), ends={stream.uid: end()})
        assert await text_of(stream) == "all of it"
        old.final()
        await until(lambda: all(s.ended for s in server.streams[:2]))
        server.refusal = None
        await until(lambda: session.ready)

    run(test)


def test_a_session_that_the_server_has_forgotten_is_replaced() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        old = server.session
        server.refusal = json.dumps(InvalidRequest("Not open.", code="no_session").payload())
        [outcome] = await session.submit([Submission(prompt="x")])
        assert isinstance(outcome, EngineDown)
        assert not session.ready
        server.refusal = None
        old.final()
        await until(lambda: session.ready)
        assert server.session is not old

    run(test)


def test_a_refused_batch_fails_its_own_requests_only() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        stream = await accepted(session)
        payload = json.dumps(InvalidRequest("Odd.").payload())
        server.refusal = f"in ensemble 'submit', {payload}"
        [outcome] = await session.submit([Submission(prompt="x")])
        assert isinstance(outcome, InvalidRequest)
        assert outcome.message == "Odd."
        server.refusal = None
        assert session.ready
        server.session.frame((stream.uid, "fine"), ends={stream.uid: end()})
        assert await text_of(stream) == "fine"

    run(test)


def test_closing_tells_the_server_and_leaves_no_stream_open() -> None:
    async def body() -> None:
        async with connected() as (server, session):
            stream = await accepted(session)
            await session.close()
            assert stream.end is not None
            assert isinstance(stream.end.error, EngineDown)
            assert [seen.parameters["session"] for seen in server.ops("close")] == [
                server.session.id
            ]
            assert all(s.half_closed and s.ended for s in server.streams)
            [outcome] = await session.submit([Submission(prompt="x")])
            assert isinstance(outcome, EngineDown)

    asyncio.run(body())


def test_closing_does_not_wait_for_a_deaf_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(link, "LAST_WORDS_SECONDS", 0.2)

    async def body() -> None:
        async with connected() as (_, session):
            monkeypatch.setattr(FakeTriton, "on_close", lambda self, request_id, seen: None)
            started = asyncio.get_running_loop().time()
            await session.close()
            assert asyncio.get_running_loop().time() - started < 20
            assert not session.ready

    asyncio.run(body())


def test_starting_without_a_server_raises_and_connects_once_it_is_there() -> None:
    async def body() -> None:
        server = FakeTriton()
        target = await server.start()
        await server.stop()
        session = Session(target)
        with pytest.raises(EngineDown, match="connection to Triton failed"):
            await session.start(timeout=2)
        await server.start(server.port)
        await session.start(timeout=PATIENCE)
        assert session.ready
        await session.close()
        await server.stop()

    asyncio.run(body())


def test_a_start_that_is_cancelled_as_it_connects_stays_cancelled() -> None:
    async def body() -> None:
        server = FakeTriton()
        target = await server.start()
        session = Session(target)
        start = asyncio.create_task(session.start())
        while not session.ready:
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await session.close()
        await server.stop()

    asyncio.run(body())


def test_starting_at_a_server_that_refuses_the_session_raises_its_reason() -> None:
    async def body() -> None:
        server = FakeTriton()
        target = await server.start()
        server.refusal = '{"message": "Protocol 1 is not spoken here.", "type": "x", "code": null}'
        session = Session(target)
        with pytest.raises(TridentError, match="Protocol 1"):
            await session.start(timeout=2)
        await session.close()
        await server.stop()

    asyncio.run(body())


def test_the_cache_is_flushed_on_request() -> None:
    async def test(server: FakeTriton, session: Session) -> None:
        await session.flush_cache()
        assert [seen.model for seen in server.ops("flush_cache")] == ["engine"]

    run(test)


def test_a_session_runs_over_tls() -> None:
    folder = Path(__file__).parent / "tls"
    key, certificate = folder / "key.pem", folder / "certificate.pem"

    async def body() -> None:
        server = FakeTriton()
        pair = (key.read_bytes(), certificate.read_bytes())
        target = await server.start(credentials=grpc.ssl_server_credentials([pair]))
        async with Session(target, tls=TlsOptions(root_certificates=certificate)) as session:
            assert session.ready
        stranger = Session(target, tls=TlsOptions())
        with pytest.raises(EngineDown):
            await stranger.start(timeout=0.3)
        await stranger.close()
        await server.stop()

    asyncio.run(body())


def test_a_missing_certificate_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="nowhere"):
        Session("localhost:1", tls=TlsOptions(root_certificates="nowhere.pem"))
