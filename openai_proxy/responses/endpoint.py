"""POST /v1/responses, and what can be done with a stored response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request

from openai_proxy.generate import GenerateEndpoint, ProxyState, Running
from openai_proxy.protocol import Job
from openai_proxy.responses.answer import ResponseAnswer
from openai_proxy.responses.request import ResponseSpec, parse_response
from openai_proxy.responses.store import ResponseStore
from openai_proxy.settings import ProxySettings
from tridentlm.errors import InternalError, InvalidRequest
from tridentlm_client import Stream

log = logging.getLogger("openai_proxy")
router = APIRouter()


class ResponsesEndpoint(GenerateEndpoint):
    """A background response goes on when its request is answered; `_tasks` keeps it alive."""

    def __init__(self, settings: ProxySettings, state: ProxyState, store: ResponseStore) -> None:
        super().__init__(self._parse_body, settings, state)
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    def _parse_body(self, body: Mapping[str, Any], model: str, settings: ProxySettings) -> Job:
        return parse_response(body, model, settings, self._store)

    def _answer(self, job: Job, streams: list[Stream]) -> ResponseAnswer:
        assert isinstance(job.context, ResponseSpec), "parse_response gives it"
        return ResponseAnswer(job, job.context, streams, self._store)

    async def _respond(self, running: Running) -> None:
        job = running.job
        spec = job.context
        assert isinstance(spec, ResponseSpec), "parse_response gives it"
        if not spec.background:
            await super()._respond(running)
            return
        answer = self._answer(job, running.streams)
        [stream] = running.streams
        running.streams.clear()  # it is not this request's any more
        response = answer.response("in_progress")
        self._store.put(response, spec.messages, stream.close)
        task = asyncio.get_running_loop().create_task(self._generate(job, stream, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await running.exchange.reply(orjson.dumps(response), running.headers)

    async def _generate(self, job: Job, stream: Stream, answer: ResponseAnswer) -> None:
        try:
            choice = answer.choices[0]
            while deltas := await stream.read():
                choice.text(deltas)
            assert stream.end is not None, "read to its end"
            error = job.error_of(stream.end)
            if error is None:
                answer.whole()
            elif stream.end.finish_reason != "abort" or stream.end.usage:
                choice.finish()
                answer.failed(error)
            else:
                choice.finish()
                answer.cancelled()
        except Exception as failure:
            log.exception("a background response failed")
            answer.failed(InternalError(f"The proxy failed: {type(failure).__name__}."))
        finally:
            stream.close()


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> dict[str, Any]:
    """A stored response, as it is now."""
    if request.query_params.get("stream") == "true":
        raise InvalidRequest(
            "stream is not supported here.", param="stream", code="unsupported_parameter"
        )
    return _store(request).get(response_id).response


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> dict[str, Any]:
    """Ends a background response; one that has ended already stays as it is."""
    store = _store(request)
    entry = store.get(response_id)
    if not entry.response["background"]:
        raise InvalidRequest("Only a background response can be cancelled.", param="response_id")
    if entry.cancel is None:
        return entry.response
    await _end(store, response_id, entry.cancel)
    return store.get(response_id).response


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> dict[str, Any]:
    """Forgets a stored response, ending it first when it is still generated."""
    store = _store(request)
    entry = store.get(response_id)
    if entry.cancel is not None:
        await _end(store, response_id, entry.cancel)
    store.drop(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


async def _end(store: ResponseStore, response_id: str, cancel: Callable[[], None]) -> None:
    """Ends a background response and waits until its task has stored that."""
    cancel()
    while store.get(response_id).cancel is not None:
        await asyncio.sleep(0)
