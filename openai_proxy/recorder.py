"""Failing requests kept as files, so that they can be sent again: `tridentlm replay FILE`.

Recorded is what the server is to blame for: a status of 500 or more, or an error event in a stream;
not a full queue. Headers are never recorded, nor fields that name a user or hold a secret.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import orjson

from openai_proxy.exchange import Exchange
from openai_proxy.parameters import LABELS
from tridentlm import __version__
from tridentlm.errors import InvalidRequest, Overloaded

log = logging.getLogger("openai_proxy")

MAX_FILES = 100
MAX_BYTES = 256 << 20
MAX_BODY = 8 << 20
_PERSONAL = LABELS | {"user"}
_SECRET = re.compile(r"api[-_]?key|authorization|password|secret|access[-_]?token", re.IGNORECASE)


class FailureRecorder:
    """Writes to `folder`, which several workers may share; the oldest files go."""

    def __init__(self, folder: str) -> None:
        """Raises InvalidRequest when the folder cannot be made or written."""
        self._folder = Path(folder).expanduser()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            writable = os.access(self._folder, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise InvalidRequest(f"{folder} cannot be written.", param="record_failures")

    def note(self, exchange: Exchange) -> None:
        """Records the exchange, which has ended, if it failed; never raises."""
        error = exchange.error
        if exchange.body is None or error is None or error.status < 500:
            return
        if isinstance(error, Overloaded):
            return
        try:
            self._write(exchange)
        except OSError as failure:
            log.warning("a failing request cannot be recorded: %s", failure)

    def _write(self, exchange: Exchange) -> None:
        if exchange.body is None or len(exchange.body) > MAX_BODY:
            log.warning("a failing request is too large to be recorded")
            return
        moment = datetime.now(timezone.utc)
        safe = re.sub(r"[^\w.-]", "_", exchange.request_id.decode())
        path = self._folder / f"{moment:%Y%m%dT%H%M%S.%f}-{safe}.json"
        data = orjson.dumps(_record(exchange, exchange.body, moment), option=orjson.OPT_INDENT_2)
        self._make_room(len(data))
        part = path.with_suffix(".part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        part.rename(path)
        log.warning("a failing request is recorded in %s", path)

    def _make_room(self, size: int) -> None:
        sizes: dict[Path, int] = {}
        for file in sorted(self._folder.glob("*.json")):
            with suppress(FileNotFoundError):  # another worker took it away
                sizes[file] = file.stat().st_size
        total = size + sum(sizes.values())
        while sizes and (len(sizes) >= MAX_FILES or total > MAX_BYTES):
            oldest = next(iter(sizes))
            total -= sizes.pop(oldest)
            oldest.unlink(missing_ok=True)


def _record(exchange: Exchange, body: bytes, moment: datetime) -> dict[str, Any]:
    assert exchange.error is not None, "only failures are recorded"
    fields: dict[str, Any] = orjson.loads(body)
    kept = {n: v for n, v in fields.items() if n not in _PERSONAL and not _SECRET.search(n)}
    return {
        "version": __version__,
        "time": moment.isoformat(timespec="milliseconds"),
        "request_id": exchange.request_id.decode(),
        "traceparent": exchange.traceparent,
        "path": exchange.scope["path"],
        "status": exchange.status,
        "error": exchange.error.payload(),
        "seconds": round(time.perf_counter() - exchange.started, 3),
        "body": kept,
        "left_out": sorted(fields.keys() - kept.keys()),
    }
