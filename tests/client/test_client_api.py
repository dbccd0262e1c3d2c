from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_triton import STATUS, FakeTriton

from tests.waiting import PATIENCE
from tridentlm_client import AsyncClient, Client, EngineDown, InvalidRequest


def answer(body: Any) -> list[str]:
    if "messages" in body:
        return [f"{body['messages'][-1]['content']}? ", "Yes."]
    if "input_ids" in body:
        return [f"{token} " for token in body["input_ids"]]
    return [f"{body['prompt']} ", "and ", f"{body['sampling']}"]


def accept(uid: str, body: Any) -> dict[str, Any]:
    if body["sampling"].get("max_tokens") == 0:
        error = InvalidRequest("max_tokens must be at least 1, got 0.", param="max_tokens")
        return {"uid": uid, "error": error.payload()}
    return {"uid": uid, "prompt_tokens": 3}


@contextmanager
def serving() -> Iterator[FakeTriton]:
    """A server in a thread of its own, for synchronous clients."""
    server = FakeTriton()
    server.answer, server.accept = answer, accept
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(PATIENCE)
        yield server
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(PATIENCE)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_generate_returns_text_ids_and_how_it_ended() -> None:
    with serving() as server, Client(f"localhost:{server.port}") as client:
        result = client.generate("salt", max_tokens=5, stop=["x"])
        assert result.text == "salt and {'max_tokens': 5, 'stop': ['x']}"
        assert result.token_ids == [0, 1, 2]
        assert (result.finish_reason, result.stop_reason) == ("stop", None)
        assert result.usage["completion_tokens"] == 3
        assert client.generate(input_ids=[5, 6]).text == "5 6 "
        chat = [{"role": "user", "content": "Really"}]
        assert client.generate(messages=chat).text == "Really? Yes."


def test_what_the_server_refuses_is_raised() -> None:
    with serving() as server, Client(f"localhost:{server.port}") as client:
        with pytest.raises(InvalidRequest, match="at least 1") as caught:
            client.generate("x", max_tokens=0)
        assert caught.value.param == "max_tokens"
        with pytest.raises(InvalidRequest, match="JSON"):
            client.generate("x", seed=object())
        assert client.generate("x").finish_reason == "stop"


def test_a_stream_gives_deltas_and_leaving_it_early_aborts() -> None:
    with serving() as server, Client(f"localhost:{server.port}") as client:
        stream = client.stream("a")
        assert [delta.text for delta in stream] == ["a ", "and ", "{}"]
        assert stream.prompt_tokens == 3
        assert stream.end is not None
        assert stream.end.finish_reason == "stop"

        server.answer = lambda body: ["word "] * 5000
        for delta in client.stream("a"):
            assert delta.text == "word "
            break
        with client.stream("b") as second:
            pass
        third = client.stream("c")
        client.abort(third.uid)
        assert len(list(third)) < 5000
        assert third.end is not None
        assert third.end.finish_reason == "abort"
        assert second.uid in server.session.aborted
        assert len(server.session.aborted) == 3


def test_status_and_cache_are_asked_of_the_engine() -> None:
    with serving() as server, Client(f"localhost:{server.port}") as client:
        assert client.status() == STATUS
        client.flush_cache()
        assert len(server.ops("flush_cache")) == 1


def test_a_client_is_shared_by_threads() -> None:
    with serving() as server, Client(f"localhost:{server.port}") as client:
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda i=i: texts.append(client.generate(input_ids=[i]).text))
            for i in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(texts) == sorted(f"{i} " for i in range(16))


def test_a_closed_client_leaves_no_session_and_refuses_calls() -> None:
    with serving() as server:
        client = Client(f"localhost:{server.port}")
        client.generate("x")
        client.close()
        client.close()
        assert all(stream.ended for stream in server.streams)
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("x")


def test_without_a_server_the_first_call_raises() -> None:
    with serving() as server:
        port = server.port
    with Client(f"localhost:{port}", timeout=0.2) as client, pytest.raises(EngineDown):
        client.generate("x")


def test_the_async_client_streams_generates_and_aborts() -> None:
    async def body() -> None:
        server = FakeTriton()
        server.answer, server.accept = answer, accept
        async with AsyncClient(await server.start()) as client:
            results = await asyncio.gather(*(client.generate(input_ids=[i]) for i in range(8)))
            assert [result.text for result in results] == [f"{i} " for i in range(8)]
            texts = [delta.text async for delta in await client.stream("a", temperature=0)]
            assert texts == ["a ", "and ", "{'temperature': 0}"]
            server.answer = lambda body: ["word "] * 5000
            async for _ in await client.stream("a"):
                break
            before = len(server.ops("submit"))
            waiting = asyncio.create_task(client.generate("b"))
            while len(server.ops("submit")) == before:
                await asyncio.sleep(0.005)
            waiting.cancel()
            stream = await client.stream("c")
            client.abort(stream.uid)
            async for _ in stream:
                pass
            assert stream.end is not None
            assert stream.end.finish_reason == "abort"
            assert len(server.session.aborted) == 3
            assert await client.status() == STATUS
            await client.flush_cache()
        assert all(stream.ended for stream in server.streams)
        await server.stop()

    asyncio.run(body())
