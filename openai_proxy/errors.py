"""Errors as HTTP, one shape for all: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from tridentlm.errors import InvalidRequest, TridentError

JSON = "application/json"


class HttpError(TridentError):
    """An error of the HTTP layer itself (401, 404, 405, 413, 415...)."""

    type = InvalidRequest.type

    def __init__(
        self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The HTTP client has disconnected: nobody is left to answer."""


def error_body(error: TridentError) -> bytes:
    return orjson.dumps({"error": error.payload()})


def error_headers(error: TridentError) -> dict[str, str]:
    """Retry-After where trying again helps; a timeout would only repeat the work."""
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    if error.status == 504:
        headers["x-should-retry"] = "false"
    return headers


def error_response(error: TridentError) -> Response:
    return Response(error_body(error), error.status, error_headers(error), media_type=JSON)


async def on_http_exception(request: Request, failure: Exception) -> Response:
    """Starlette's own 404 and 405 in our shape."""
    assert isinstance(failure, HTTPException)
    where = f"{request.method} {request.url.path}"
    message, code = {
        404: (f"Unknown URL: {where}.", "unknown_url"),
        405: (f"Method not allowed: {where}.", "method_not_allowed"),
    }.get(failure.status_code, (str(failure.detail), "http_error"))
    return error_response(HttpError(failure.status_code, message, code, failure.headers))


async def on_validation_error(request: Request, failure: Exception) -> Response:
    """A path or query parameter of the wrong type (bodies are checked by `protocol`)."""
    assert isinstance(failure, RequestValidationError)
    first: dict[str, Any] = failure.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    return error_response(InvalidRequest(str(first["msg"]), param=param))
