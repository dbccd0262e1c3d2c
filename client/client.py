"""`AsyncClient` and `Client`: generate text on a TridentLM server in one call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tridentlm.errors import TridentError
from tridentlm.protocol import TokenLogprob
from tridentlm_client.session import Session
from tridentlm_client.stream import Delta, End, Stream, Submission
from tridentlm_client.wire import TlsOptions

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `finish_reason` is stop, length or abort.

    `usage` counts tokens: prompt_tokens, completion_tokens, cached_tokens (of the prompt).
    `logprobs` and `prompt_logprobs` are empty unless the sampling asked for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, Any]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class AsyncClient:
    """Talks to Triton at `target` ("host:port" of its gRPC service), through one session.

        async with AsyncClient("localhost:8001") as client:
            result = await client.generate("The sea is", max_tokens=16, temperature=0)
            print(result.text, result.finish_reason)

            chat = [{"role": "user", "content": "Tell me a joke."}]
            async for delta in await client.stream(messages=chat):
                print(delta.text, end="", flush=True)

    The first call connects and waits up to `timeout` seconds for the server. Every call raises a
    TridentError for what the server refuses, and EngineDown when it cannot be reached.
    """

    def __init__(
        self,
        target: str,
        *,
        engine: str = "engine",
        submit: str = "submit",
        tls: TlsOptions | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._session = Session(target, engine=engine, submit=submit, tls=tls)
        self._timeout = timeout

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Result:
        """Waits for the whole answer to a prompt, a chat or token ids.

        `sampling`: fields of `SamplingParams`, such as max_tokens, temperature, top_p, stop, seed.
        """
        stream = await self._submit(prompt, messages, input_ids, chat_template_kwargs, sampling)
        texts: list[str] = []
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        of_prompt: list[TokenLogprob] = []
        async for delta in stream:
            texts.append(delta.text)
            ids += (delta.extra or {}).get("token_ids", [])
            logprobs += delta.logprobs
            of_prompt += delta.prompt_logprobs
        end = stream.end
        assert end is not None
        reasons = end.finish_reason, end.stop_reason
        return Result("".join(texts), ids, *reasons, end.usage, logprobs, of_prompt)

    async def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Like `generate`, but returns the stream once the request is admitted.

        Leaving the loop over it, or its `async with`, before the end aborts the request. `end` then
        tells how it ended.
        """
        return await self._submit(prompt, messages, input_ids, chat_template_kwargs, sampling)

    async def status(self) -> dict[str, Any]:
        """The engine's state: model, limits, free pages, running and waiting requests."""
        await self._session.start(self._timeout)
        return await self._session.fetch_status()

    async def flush_cache(self) -> None:
        """Empties the prefix cache."""
        await self._session.start(self._timeout)
        await self._session.flush_cache()

    def abort(self, uid: str) -> None:
        """Ends the request of a stream with this `uid`; its finish reason is then abort."""
        self._session.abort(uid)

    async def close(self) -> None:
        """Aborts what still runs and ends the session."""
        await self._session.close()

    async def _submit(
        self,
        prompt: str | None,
        messages: Messages | None,
        input_ids: Sequence[int] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        sampling: Mapping[str, Any],
    ) -> Stream:
        await self._session.start(self._timeout)
        submission = Submission(
            prompt=prompt,
            messages=messages,
            input_ids=input_ids,
            sampling=sampling,
            return_token_ids=True,
            chat_template_kwargs=chat_template_kwargs or {},
        )
        [outcome] = await self._session.submit([submission])
        if isinstance(outcome, TridentError):
            raise outcome
        return outcome


class ClientStream:
    """A stream for synchronous callers: iterate it; leaving the loop early aborts the request."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client
        self._stream = stream
        self.uid = stream.uid
        self.prompt_tokens = stream.prompt_tokens

    @property
    def end(self) -> End | None:
        """How the request ended; None while it runs."""
        return self._stream.end

    def __iter__(self) -> Iterator[Delta]:
        try:
            while deltas := self._client.run(self._stream.read()):
                yield from deltas
        finally:
            self.close()
        if self.end is not None and self.end.error is not None:
            raise self.end.error

    def __enter__(self) -> ClientStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts an unfinished request."""
        self._client.call(self._stream.close)


class Client:
    """`AsyncClient` for synchronous code; usable from several threads.

    with Client("localhost:8001") as client:
        print(client.generate("The sea is", max_tokens=16).text)
        for delta in client.stream(messages=[{"role": "user", "content": "Hi!"}]):
            print(delta.text, end="", flush=True)
    """

    def __init__(
        self,
        target: str,
        *,
        engine: str = "engine",
        submit: str = "submit",
        tls: TlsOptions | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._client = AsyncClient(target, engine=engine, submit=submit, tls=tls, timeout=timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(self, prompt: str | None = None, **options: Any) -> Result:
        """Waits for the whole answer; takes the options of `AsyncClient.generate`."""
        return self.run(self._client.generate(prompt, **options))

    def stream(self, prompt: str | None = None, **options: Any) -> ClientStream:
        """Returns once the request is admitted; takes the options of `AsyncClient.stream`."""
        return ClientStream(self, self.run(self._client.stream(prompt, **options)))

    def status(self) -> dict[str, Any]:
        """The engine's state: model, limits, free pages, running and waiting requests."""
        return self.run(self._client.status())

    def flush_cache(self) -> None:
        """Empties the prefix cache."""
        self.run(self._client.flush_cache())

    def abort(self, uid: str) -> None:
        """Ends the request of a stream with this `uid`; its finish reason is then abort."""
        self.call(self._client.abort, uid)

    def close(self) -> None:
        """Aborts what still runs and ends the session."""
        if self._loop.is_closed():
            return
        self.run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; it runs in the client's thread. Interrupted, it is cancelled."""
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Any, *arguments: Any) -> None:
        """Calls a function in the client's thread, unless the client is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)
