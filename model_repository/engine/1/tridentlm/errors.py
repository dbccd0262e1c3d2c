"""Every error that a user can meet, as one tree.

    TridentError
    |-- InvalidRequest     400   the request can never work as it is
    |   `-- ContextLengthExceeded    400, code context_length_exceeded
    |-- ModelNotFound      404
    |-- Overloaded         503   try again later (`retry_after` seconds)
    |-- EngineDown         503   the engine process is gone or the server drains
    |-- RequestTimeout     504   the request's own `timeout` has passed
    `-- InternalError      500   our fault

On every border (Triton's error text, a submission's outcome, a frame, an HTTP body) an error is the
same four fields: `message`, `type`, `param`, `code`, with OpenAI's spelling of `type` and `code`.
"""

from __future__ import annotations

from typing import Any


class TridentError(Exception):
    """Base of all errors. `status` is the HTTP status that the proxy answers with."""

    status = 500
    type = "server_error"
    default_code: str | None = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code

    def payload(self) -> dict[str, Any]:
        """The error on the wire: `{"message", "type", "param", "code"}`."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }


class InvalidRequest(TridentError):
    status = 400
    type = "invalid_request_error"
    default_code: str | None = None


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class ModelNotFound(TridentError):
    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"


class Overloaded(TridentError):
    status = 503
    type = "overloaded_error"
    default_code = "overloaded"
    retry_after = 1


class EngineDown(TridentError):
    status = 503
    type = "server_error"
    default_code = "engine_down"
    retry_after = 2


class RequestTimeout(TridentError):
    status = 504
    type = "timeout_error"
    default_code = "timeout"


class InternalError(TridentError):
    pass


def from_payload(payload: dict[str, Any]) -> TridentError:
    """Rebuilds the error whose `payload()` crossed a border."""
    code, kind = payload.get("code"), payload.get("type")
    cls: type[TridentError] = InternalError
    for candidate in (ContextLengthExceeded, ModelNotFound, Overloaded, EngineDown, RequestTimeout):
        if code == candidate.default_code:
            cls = candidate
            break
    else:
        if kind == InvalidRequest.type:
            cls = InvalidRequest
    return cls(str(payload.get("message", "unknown error")), param=payload.get("param"), code=code)
