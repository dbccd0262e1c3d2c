"""The outermost layer: request id, key, errors of every kind, access log and metrics."""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from openai_proxy.errors import SHUTDOWN, ClientGone, HttpError
from openai_proxy.exchange import Exchange
from openai_proxy.logs import log_access
from openai_proxy.metrics import ProxyMetrics
from openai_proxy.recorder import FailureRecorder
from tridentlm.errors import EngineDown, InternalError, TridentError

log = logging.getLogger("openai_proxy")

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
CLIENT_GONE_STATUS = 499


class Gate:
    """Wraps the application; puts an `Exchange` into the scope of every HTTP request.

    Every TridentError that leaves the application becomes its status and body, anything else a 500.
    An error after the status line closes the connection: streams write their own error events.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str,
        metrics: ProxyMetrics,
        routes: frozenset[str],
        recorder: FailureRecorder | None = None,
    ) -> None:
        self._app = app
        self._expected = api_key.encode() if api_key else None
        self._metrics = metrics
        self._routes = routes
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope["exchange"] = Exchange(scope, receive, send)
        exchange.keeps_body = self._recorder is not None
        self._metrics.begin()
        try:
            await self._answer(exchange)
        finally:
            path = scope["path"]
            self._metrics.end(exchange, path if path in self._routes else "other")
            log_access(exchange)
            if self._recorder is not None:
                self._recorder.note(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            self._check_key(exchange)
            scope = exchange.scope
            if scope["method"] == "HEAD":  # the server leaves the body of a GET out
                scope = {**scope, "method": "GET"}
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            exchange.status = CLIENT_GONE_STATUS
        except asyncio.CancelledError:
            # The server cancels what is left when a shutdown has lasted too long.
            if exchange.status:
                raise
            await exchange.fail(EngineDown(SHUTDOWN))
        except TridentError as error:
            if exchange.status:
                raise
            await exchange.fail(error)
        except Exception as failure:
            log.exception("request %s failed", exchange.request_id.decode())
            if exchange.status:
                raise
            await exchange.fail(InternalError(f"The proxy failed: {type(failure).__name__}."))

    def _check_key(self, exchange: Exchange) -> None:
        if self._expected is None or exchange.scope["path"] in OPEN_PATHS:
            return
        given = exchange.headers.get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key, self._expected):
            message = (
                "Incorrect API key." if given else "No API key: send Authorization: Bearer KEY."
            )
            raise HttpError(401, message, "invalid_api_key", {"www-authenticate": "Bearer"})
