"""Triton's tensors, parameters and response senders, as plain Python values.

One of the modules that may import `triton_python_backend_utils`, which exists only inside Triton.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import triton_python_backend_utils as pb_utils

import tridentlm
from tridentlm.config import read_parameters
from tridentlm.errors import InternalError, InvalidRequest, TridentError

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# By name: the helper process in which Triton completes configurations has no error class yet.
_CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 503: "UNAVAILABLE"}


def text_tensor(name: str, value: str | bytes) -> Any:
    """A STRING tensor of shape [1]."""
    return pb_utils.Tensor(name, np.array([value], dtype=object))


def array(request: Any, name: str) -> np.ndarray[Any, Any] | None:
    """The input as a private numpy copy, None when the client left it out."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)


def strings(request: Any, name: str) -> list[str] | None:
    """A STRING input as a list. Raises InvalidRequest when it is not UTF-8."""
    values = array(request, name)
    try:
        return None if values is None else [value.decode() for value in values.tolist()]
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name} is not valid UTF-8.", param=name) from None


def string(request: Any, name: str) -> str | None:
    values = strings(request, name)
    return values[0] if values else None


def parameters(request: Any) -> dict[str, Any]:
    """The request's parameters: str, bool, int or float values."""
    values: dict[str, Any] = json.loads(request.parameters() or "{}")
    return values


def json_object(text: str, name: str) -> dict[str, Any]:
    """Parses a JSON object. Raises InvalidRequest naming the input."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}.", param=name) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object.", param=name)
    return value


def as_trident_error(error: Exception) -> TridentError:
    if isinstance(error, TridentError):
        return error
    return InternalError(f"{type(error).__name__}: {error}")


def error_response(error: TridentError) -> Any:
    """A response that carries the error's JSON as Triton's error text (its own codes are lost)."""
    code = getattr(pb_utils.TritonError, _CODES.get(error.status, "INTERNAL"))
    body = orjson.dumps(error.payload()).decode()
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(body, code))


def config_parameters(args: dict[str, str]) -> dict[str, str]:
    """The `parameters` of the model's config.pbtxt."""
    entries = json.loads(args["model_config"]).get("parameters", {})
    return {name: entry["string_value"] for name, entry in entries.items()}


def engine_parameters(args: dict[str, str]) -> dict[str, str]:
    """The parameters of the engine that this model works for, which tell what model it runs."""
    engine = config_parameters(args).get("engine", "engine")
    config = Path(args["model_repository"]).parent / engine / "config.pbtxt"
    return read_parameters(config) if config.is_file() else {}


def check_package_version(model_file: Path) -> None:
    """Raises RuntimeError when an installed package shadows another version in the repository."""
    own = model_file.resolve().parents[2] / "engine" / "1" / "tridentlm" / "__init__.py"
    found = re.search(r'__version__ = "([^"]+)"', own.read_text()) if own.exists() else None
    if found and found[1] != tridentlm.__version__:
        raise RuntimeError(
            f"This model repository is of tridentlm {found[1]}, but version "
            f"{tridentlm.__version__} is installed in {Path(tridentlm.__file__).parent}. "
            "Install the repository's version, or write the repository anew with "
            "`tridentlm repository DIR`."
        )


class Responder:
    """A response sender that can be polled and closed from several threads.

    Triton crashes when `is_cancelled()` runs after or while the FINAL flag is sent, and a client
    waits for ever when FINAL is never sent: one lock guards both, and every end goes through here.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._closed = False

    def send(self, tensors: list[Any], *, final: bool = False) -> None:
        """Sends one response. A closed responder drops it."""
        self._send(pb_utils.InferenceResponse(tensors), final)

    def fail(self, error: TridentError) -> None:
        """Ends the request with Triton's own error: only before any other response."""
        self._send(error_response(error), True)

    def finish(self) -> None:
        """Ends the request without a further response."""
        self._send(None, True)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._closed and bool(self._sender.is_cancelled())

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = final
            flags = FINAL if final else 0
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)
