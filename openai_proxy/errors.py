"""Errors as HTTP, one shape for all: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tridentlm.errors import InvalidRequest, TridentError


class HttpError(TridentError):
    """An error of the HTTP layer itself (401, 404, 405, 413, 415...)."""

    type = InvalidRequest.type

    def __init__(
        self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.headers = dict(headers or {})


_MAX_MESSAGE = 1000

SHUTDOWN = "The proxy shuts down."


class ClientGone(Exception):
    """The HTTP client has disconnected: nobody is left to answer."""


def error_body(error: TridentError) -> bytes:
    """The body; a message that quotes megabytes of input is cut."""
    payload = error.payload()
    payload["message"] = payload["message"][:_MAX_MESSAGE]
    return orjson.dumps({"error": payload})


def error_headers(error: TridentError) -> dict[str, str]:
    """Retry-After where trying again helps; a timeout would only repeat the work."""
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    if error.status == 504:
        headers["x-should-retry"] = "false"
    return headers


async def on_http_exception(request: Request, failure: Exception) -> NoReturn:
    """Starlette's own errors, such as 404 and 405, as ours: HttpError, for the outer layer."""
    assert isinstance(failure, HTTPException)
    where = f"{request.method} {request.url.path}"
    message, code = {
        404: (f"Unknown URL: {where}.", "unknown_url"),
        405: (f"Method not allowed: {where}.", "method_not_allowed"),
    }.get(failure.status_code, (str(failure.detail), "http_error"))
    raise HttpError(failure.status_code, message, code, failure.headers) from None
