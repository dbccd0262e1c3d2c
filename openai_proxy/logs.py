"""Logging of the proxy: one access line per request, plain or as JSON."""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timezone
from typing import Any

import orjson

from openai_proxy.exchange import Exchange

access = logging.getLogger("openai_proxy.access")


class JsonFormatter(logging.Formatter):
    """One JSON object per line; the fields of an access record are keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure_logging(*, as_json: bool) -> None:
    """Sends the proxy's, the client's and the server's records to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    for name in ("openai_proxy", "tridentlm_client", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def log_access(exchange: Exchange) -> None:
    if not access.isEnabledFor(logging.INFO):
        return
    scope = exchange.scope
    client = scope.get("client")
    fields = {
        "request_id": exchange.request_id.decode(),
        "traceparent": exchange.traceparent,
        "client": f"{client[0]}:{client[1]}" if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": exchange.status,
        "error": exchange.error_code,
        "ms": round(exchange.elapsed * 1000, 1),
        "ttft_ms": None if exchange.ttft is None else round(exchange.ttft * 1000, 1),
        "prompt_tokens": exchange.prompt_tokens,
        "completion_tokens": exchange.completion_tokens,
    }
    shown = " ".join(f"{name}={value}" for name, value in fields.items() if value not in (None, 0))
    access.info("%s", shown, extra={"fields": fields})
