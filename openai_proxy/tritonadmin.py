"""The few calls of Triton's HTTP API with which the launcher looks after a server."""

from __future__ import annotations

import http.client
import json
from typing import Any

from tridentlm.errors import TridentError


class AdminError(TridentError):
    """Triton refused the call (the message is then its own) or could not be reached."""


class TritonAdmin:
    """Blocking calls; `timeout` (seconds) holds for all but `load`, which may take minutes."""

    def __init__(self, host: str, port: int, timeout: float = 5.0) -> None:
        self._host = host
        self._port = port
        self._timeout = timeout

    def ready(self) -> bool:
        try:
            self._call("GET", "/v2/health/ready", self._timeout)
        except AdminError:
            return False
        return True

    def states(self) -> dict[str, str]:
        """{model: "READY" | "LOADING" | "UNLOADING" | "UNAVAILABLE" | ""} of the repository."""
        models = json.loads(self._call("POST", "/v2/repository/index", self._timeout))
        return {model["name"]: model.get("state", "") for model in models}

    def load(self, model: str, timeout: float) -> None:
        self._call("POST", f"/v2/repository/models/{model}/load", timeout)

    def unload(self, model: str) -> None:
        self._call("POST", f"/v2/repository/models/{model}/unload", self._timeout)

    def _call(self, method: str, path: str, timeout: float) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, path, body=b"{}" if method == "POST" else None)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise AdminError(f"{method} {path}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise AdminError(f"{method} {path}: {_message(body) or response.status}")
        return body


def _message(body: bytes) -> str:
    try:
        content: Any = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")
    return str(content.get("error", content)) if isinstance(content, dict) else str(content)
