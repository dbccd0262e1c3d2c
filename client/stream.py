"""What a caller submits and what comes back: `Submission`, `Stream`, `Delta`, `End`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from tridentlm.errors import TridentError, from_payload
from tridentlm.protocol import TokenLogprob


@dataclass(frozen=True, slots=True)
class Submission:
    """One request. Exactly one of `prompt`, `messages` and `input_ids` must be given.

    `sampling` holds fields of `SamplingParams`; the server checks them. With `return_token_ids`
    each delta's `extra` has the key `token_ids`. `chat_template` goes before the model's own.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    input_ids: Sequence[int] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    return_token_ids: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    def pack(self) -> bytes:
        """The JSON object on the wire. Raises TypeError for what JSON cannot hold."""
        body: dict[str, Any] = {"sampling": self.sampling}
        for name in ("prompt", "messages", "input_ids"):
            value = getattr(self, name)
            if value is not None:
                body[name] = value
        if self.return_token_ids:
            body["return_token_ids"] = True
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = self.chat_template_kwargs
        if self.chat_template is not None:
            body["chat_template"] = self.chat_template
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


class Delta(NamedTuple):
    """New text and the number of tokens it stands for. `extra` has what else was asked for.

    Its keys are token_ids, logprobs and prompt_logprobs; the latter two as the wire has them.
    """

    text: str
    count: int  # type: ignore[assignment]
    extra: dict[str, Any] | None = None

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Of the tokens whose text has come with this delta, with `logprobs` in the sampling."""
        return self._told("logprobs")

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Of the prompt, a part in each of some deltas, with `prompt_logprobs` in the sampling."""
        return self._told("prompt_logprobs")

    def _told(self, name: str) -> list[TokenLogprob]:
        return [TokenLogprob.unpack(entry) for entry in (self.extra or {}).get(name, ())]


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended. `finish_reason` is stop, length, abort or error."""

    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, Any]
    error: TridentError | None = None

    @classmethod
    def from_wire(cls, end: Mapping[str, Any]) -> End:
        error = end.get("error")
        return cls(
            end.get("finish_reason") or "error",
            end.get("stop_reason"),
            end.get("usage") or {},
            from_payload(error) if error else None,
        )

    @classmethod
    def from_error(cls, error: TridentError) -> End:
        return cls("error", None, {}, error)


class Stream:
    """The output of one accepted request; one reader at a time.

    Three ways to read it, of which a caller picks one:

        await stream.read()          waits, then returns all deltas that are there; [] at the end
        async for delta in stream    each delta; raises the error that ended the request
        stream.on_news = callback    called after news arrived; the callback calls `take()`

    `end` is set together with the last deltas, so it may be there before they were read. Leaving
    `async with` or the loop before the end aborts the request.
    """

    __slots__ = (
        "_abort",
        "_forget",
        "_pending",
        "_waiter",
        "end",
        "on_news",
        "prompt_tokens",
        "uid",
    )

    def __init__(
        self, uid: str, abort: Callable[[str], None], forget: Callable[[str], None]
    ) -> None:
        self.uid = uid
        self.prompt_tokens = 0
        self.end: End | None = None
        self.on_news: Callable[[], None] | None = None
        self._pending: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._abort = abort
        self._forget = forget

    async def read(self) -> list[Delta]:
        """All deltas since the last call, waiting for news when there are none; [] at the end."""
        if not self._pending and self.end is None:
            if self._waiter is not None:
                raise RuntimeError("another task already reads this stream")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def take(self) -> list[Delta]:
        """All deltas since the last call, without waiting."""
        pending, self._pending = self._pending, []
        return pending

    def abort(self) -> None:
        """Ends the request early: its `end` then says abort. Does nothing after the end."""
        if self.end is None:
            self._abort(self.uid)

    def close(self) -> None:
        """Aborts an unfinished request and drops whatever it still sends."""
        if self.end is None:
            self._forget(self.uid)
            self._abort(self.uid)
            self.end = End("abort", None, {})
            self.notify()

    def notify(self) -> None:
        """Wakes the reader or runs its callback."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self.on_news is not None:
            self.on_news()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while deltas := await self.read():
                for delta in deltas:
                    yield delta
        finally:
            self.close()
        if self.end is not None and self.end.error is not None:
            raise self.end.error
