"""One HTTP exchange: what the outermost layer, the endpoints and the access log share."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send

from openai_proxy.errors import ClientGone, HttpError, error_body, error_headers
from tridentlm.errors import InvalidRequest, TridentError

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

Headers = list[tuple[bytes, bytes]]


class Exchange:
    """`receive` and `send` are the server's own, below every middleware.

    `status` is 0 until a response starts. `traceparent` is W3C's header, None without a well-formed
    one. `body` is the request's, with `keeps_body`; `error` is what it ended with.
    `prompt_tokens` and `completion_tokens` are filled in by the endpoints for the access log.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        sane = _SANE_ID.fullmatch(given) is not None
        self.request_id = given if sane else b"req-" + os.urandom(12).hex().encode()
        trace = self.headers.get(b"traceparent", b"")
        self.traceparent = trace.decode() if _TRACEPARENT.fullmatch(trace) else None
        self.started = time.perf_counter()
        self.status = 0
        self.error: TridentError | None = None
        self.keeps_body = False
        self.body: bytes | None = None
        self.ttft: float | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.started

    @property
    def error_code(self) -> str | None:
        return None if self.error is None else self.error.code or self.error.type

    def count(self, usage: Mapping[str, Any]) -> None:
        self.prompt_tokens = usage["prompt_tokens"]
        self.completion_tokens = usage["completion_tokens"]

    async def send(self, message: Message) -> None:
        """Sends through, noting the status and adding `x-request-id`."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id)]
            message = {**message, "headers": headers}
        await self._send(message)

    @property
    def send_body(self) -> Send:
        """The server's own send, for the many body messages of a stream."""
        return self._send

    async def start(self, headers: Headers, status: int = 200) -> None:
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def reply(self, body: bytes, headers: Headers, status: int = 200) -> None:
        """A whole JSON response."""
        length = str(len(body)).encode()
        fixed = [(b"content-type", b"application/json"), (b"content-length", length)]
        await self.start(fixed + headers, status)
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: TridentError) -> None:
        self.error = error
        headers = [(k.encode(), v.encode("latin-1")) for k, v in error_headers(error).items()]
        await self.reply(error_body(error), headers, error.status)

    async def read_json(self, limit: int) -> dict[str, Any]:
        """The body as a JSON object of at most `limit` bytes.

        Raises HttpError 413 and 415, InvalidRequest for broken JSON, ClientGone.
        """
        self._check_content()
        body = await self._read_body(limit)
        if self.keeps_body:
            self.body = body
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(
                f"The body is not valid JSON: {error}.", code="invalid_json"
            ) from None
        if not isinstance(value, dict):
            raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
        return value

    def _check_content(self) -> None:
        kind = self.headers.get(b"content-type", b"application/json")
        media = kind.split(b";", 1)[0].strip().lower()
        if media != b"application/json" and not media.endswith(b"+json"):
            name = media.decode("latin-1")
            raise HttpError(
                415, f"content-type must be application/json, not {name}.", "unsupported_media_type"
            )
        coding = self.headers.get(b"content-encoding", b"identity").lower()
        if coding != b"identity":
            name = coding.decode("latin-1")
            raise HttpError(415, f"content-encoding {name} is not supported.", "unsupported_coding")

    async def _read_body(self, limit: int) -> bytes:
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return b"".join(parts)


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body is larger than {limit} bytes.", "content_too_large")
