from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from fake_triton import FakeTriton, accepted, connected, end, run, text_of, until

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
)
from tridentlm_client import session as session_module


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
