"""`tridentlm replay`: sends a recorded request again and shows the answer as it comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson

from tridentlm.errors import InvalidRequest, TridentError

ERROR_EVENTS = ('data: {"error":', "event: response.failed", "event: error")


def run_replay(file: Path, url: str, api_key: str, say: Callable[[str], None]) -> int:
    """0 when the request is answered this time, 1 when it fails again."""
    record = _read(file)
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    failed = False
    try:
        with httpx.stream(
            "POST",
            url.rstrip("/") + record["path"],
            content=orjson.dumps(record["body"]),
            headers=headers,
            timeout=httpx.Timeout(10.0, read=None),
        ) as response:
            say(f"{response.status_code} {response.headers.get('x-request-id', '')}")
            for line in response.iter_lines():
                failed = failed or line.startswith(ERROR_EVENTS)
                say(line)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TridentError(f"{url} does not answer: {error}") from None
    return int(failed or response.status_code >= 400)


def _read(file: Path) -> dict[str, Any]:
    try:
        record = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="file") from None
    if not isinstance(record, dict) or not {"path", "body"} <= record.keys():
        raise InvalidRequest(f"{file} is no recorded request.", param="file")
    return record
