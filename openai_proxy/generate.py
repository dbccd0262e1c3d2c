"""The POST endpoints that generate, as raw ASGI applications.

    read body -> parse -> submit -- every prompt admitted --> first engine output --> 200 + events
       4xx        4xx     4xx/503 (accepted neighbours are aborted)   4xx/5xx         error event

Whatever happens, and above all when the client goes, in any of these states, `finally` aborts the
requests that have not ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from openai_proxy.answers import Answer, AnswerLike
from openai_proxy.errors import SHUTDOWN, ClientGone
from openai_proxy.exchange import Exchange, Headers
from openai_proxy.models import Models
from openai_proxy.parameters import IgnoredParameters
from openai_proxy.protocol import Job
from openai_proxy.sessions import SessionLike
from openai_proxy.settings import ProxySettings
from openai_proxy.sse import EventStream
from tridentlm.errors import EngineDown, TridentError
from tridentlm_client import Stream

Parser = Callable[[Mapping[str, Any], str, ProxySettings], Job]


class ProxyState(Protocol):
    """The part of the application's state that the endpoints share."""

    models: Models
    ignored: IgnoredParameters


@dataclass(slots=True)
class Running:
    """A parsed request on its way. `streams` are those that end with it, filled at admission;
    `headers` are the answer's own; `gone` ends when the client has gone."""

    exchange: Exchange
    job: Job
    headers: Headers
    gone: asyncio.Future[None]
    streams: list[Stream] = field(default_factory=list)


class GenerateEndpoint:
    """Answers POSTs whose bodies `parse` understands."""

    def __init__(self, parse: Parser, settings: ProxySettings, state: ProxyState) -> None:
        self._parse = parse
        self._settings = settings
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        body = await exchange.read_json(self._settings.max_body_bytes)
        served = self._state.models.choose(body)
        model = served.require_ready()
        job = await served.templates.prepare(self._parse(body, model, self._settings))
        headers = self._state.ignored.headers(job.ignored)
        gone = asyncio.ensure_future(_wait_disconnect(exchange.receive))
        running = Running(exchange, job, headers, gone)
        try:
            await _admit(served.session, running)
            await self._respond(running)
        finally:
            gone.cancel()
            for stream in running.streams:
                stream.on_news = None
                stream.close()

    def _answer(self, job: Job, streams: list[Stream]) -> AnswerLike:
        return Answer(job, streams)

    async def _respond(self, running: Running) -> None:
        answer = self._answer(running.job, running.streams)
        if running.job.stream:
            keep_alive = self._settings.sse_keep_alive
            events = EventStream(running.exchange, running.job, answer, running.headers, keep_alive)
            await _answer_events(running, answer, events)
        else:
            await _answer_whole(running, answer)


async def _wait_disconnect(receive: Receive) -> None:
    """Ends when the client has gone, or when the whole response is written."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _admit(session: SessionLike, running: Running) -> None:
    """Fills `streams` with the admitted requests. Raises the first refusal; ClientGone."""
    job, gone = running.job, running.gone
    submitting = asyncio.ensure_future(session.submit(job.submissions))
    try:
        await asyncio.wait((submitting, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        # A cancelled submission aborts its requests; a finished one leaves them to the caller.
        submitting.cancel()
    if not submitting.done():
        raise ClientGone
    outcomes = submitting.result()
    running.streams += [each for each in outcomes if not isinstance(each, TridentError)]
    for outcome in outcomes:
        if isinstance(outcome, TridentError):
            raise job.localized(outcome)
    if gone.done():
        raise ClientGone


async def _answer_events(running: Running, answer: AnswerLike, events: EventStream) -> None:
    events.begin()
    try:
        await asyncio.wait((events.over, running.gone), return_when=asyncio.FIRST_COMPLETED)
        if not events.over.done():
            raise ClientGone
        events.over.result()
    except asyncio.CancelledError:
        if not events.begun:
            raise
        await _end_broken(running.exchange, answer, EngineDown(SHUTDOWN))
    except TridentError as error:
        if not events.begun:
            raise
        await _end_broken(running.exchange, answer, error)
    finally:
        events.close()


async def _end_broken(exchange: Exchange, answer: AnswerLike, error: TridentError) -> None:
    exchange.error = error
    await exchange.send_body(
        {"type": "http.response.body", "body": b"".join(answer.failure(error))}
    )


async def _answer_whole(running: Running, answer: AnswerLike) -> None:
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    exchange, unfinished = running.exchange, set(running.streams)

    def news(stream: Stream) -> None:
        if exchange.ttft is None:
            exchange.ttft = exchange.elapsed
        if over.done():
            return
        if running.job.tells_logprobs:
            try:
                answer.collect(stream)
            except Exception as failure:  # it is this request's alone, and not its session's
                over.set_exception(failure)
                return
        if stream.end is None:
            return
        unfinished.discard(stream)
        error = running.job.error_of(stream.end)
        if error is not None:
            over.set_exception(error)
        elif not unfinished:
            over.set_result(None)

    for stream in running.streams:
        stream.on_news = partial(news, stream)
        if stream.end is not None:
            news(stream)
    await asyncio.wait((over, running.gone), return_when=asyncio.FIRST_COMPLETED)
    if not over.done():
        raise ClientGone
    over.result()
    body = answer.whole()
    exchange.count(answer.usage())
    await exchange.reply(body, running.headers)
