"""The GET endpoints: models, health, metrics, version."""

from __future__ import annotations

import logging
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import Response
from tridentlm import __version__
from tridentlm.errors import EngineDown, InvalidRequest

from openai_proxy.metrics import ProxyMetrics, readiness_text
from openai_proxy.protocol import unknown_model
from openai_proxy.sessions import SessionLike, served_model, unready_reason
from openai_proxy.settings import ProxySettings

log = logging.getLogger("openai_proxy")
router = APIRouter()

_SCRAPE_SECONDS = 2.0
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def _session(request: Request) -> SessionLike:
    session: SessionLike = request.app.state.session
    return session


def _model(request: Request) -> dict[str, Any]:
    session = _session(request)
    name = served_model(session)
    settings: ProxySettings = request.app.state.settings
    return {
        "id": name,
        "object": "model",
        "created": settings.started,
        "owned_by": "tridentlm",
        "max_model_len": (session.status or {}).get("max_model_len"),
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model(request)]}


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    model = _model(request)
    if model["id"] != model_id:
        raise unknown_model(model_id, model["id"])
    return model


@router.post("/v1/embeddings")
async def embeddings() -> dict[str, Any]:
    """Always a 400: a server of a generating model has no embeddings."""
    raise InvalidRequest(
        "This server generates text; its model gives no embeddings.", code="unsupported_endpoint"
    )


@router.get("/health/live")
async def live() -> dict[str, str]:
    """The process answers."""
    return {"status": "live"}


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> dict[str, str]:
    """The engine is connected, up and takes requests; else 503 with the reason."""
    reason = unready_reason(_session(request))
    if reason is not None:
        raise EngineDown(reason)
    return {"status": "ready"}


@router.get("/version")
async def version(request: Request) -> dict[str, Any]:
    status = _session(request).status or {}
    return {"version": __version__, "engine_version": status.get("version")}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Triton's exposition, if its address was given, and the proxy's over all workers."""
    state = request.app.state
    settings: ProxySettings = state.settings
    own: ProxyMetrics = state.metrics
    triton = await _scrape(settings.triton_metrics) if settings.triton_metrics else b""
    ready = unready_reason(_session(request)) is None
    return Response(triton + readiness_text(triton, ready) + own.render(), media_type=_EXPOSITION)


async def _scrape(url: str) -> bytes:
    try:
        async with httpx.AsyncClient(timeout=_SCRAPE_SECONDS) as client:
            answer = await client.get(url)
            answer.raise_for_status()
    except httpx.HTTPError as error:
        log.warning("Triton's metrics at %s cannot be read: %r", url, error)
        return b""
    return answer.content if answer.content.endswith(b"\n") else answer.content + b"\n"
