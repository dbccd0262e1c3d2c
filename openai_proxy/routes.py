"""The GET endpoints: models, health, metrics, version."""

from __future__ import annotations

import logging
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from openai_proxy.metrics import ProxyMetrics, readiness_text
from openai_proxy.models import Models, ServedModel
from openai_proxy.sessions import NO_CONNECTION
from openai_proxy.settings import ProxySettings
from tridentlm import __version__
from tridentlm.errors import EngineDown, InvalidRequest

log = logging.getLogger("openai_proxy")
router = APIRouter()

_SCRAPE_SECONDS = 2.0
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def _models(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


def _describe(request: Request, model: ServedModel, name: str) -> dict[str, Any]:
    settings: ProxySettings = request.app.state.settings
    return {
        "id": name,
        "object": "model",
        "created": settings.started,
        "owned_by": "tridentlm",
        "max_model_len": model.status.get("max_model_len"),
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Every name that a request's `model` may have, aliases too."""
    data = [_describe(request, m, name) for m in _models(request) for name in m.names]
    if not data:
        raise EngineDown(NO_CONNECTION)
    return {"object": "list", "data": data}


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    return _describe(request, _models(request).find(model_id), model_id)


@router.post("/v1/embeddings", status_code=400)
async def embeddings() -> None:
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
async def ready(request: Request) -> dict[str, Any]:
    """A model can be asked; else 503 with the reasons. With several models it says which can."""
    models = list(_models(request))
    reasons = {_title(model): model.unready_reason for model in models}
    if len(models) == 1 and None in reasons.values():
        return {"status": "ready"}
    if None not in reasons.values():
        told = [f"{name}: {reason}" for name, reason in reasons.items()] if len(models) > 1 else []
        raise EngineDown(" ".join(told) or next(iter(reasons.values()), None) or NO_CONNECTION)
    status = "degraded" if any(reasons.values()) else "ready"
    return {"status": status, "models": {name: r or "ready" for name, r in reasons.items()}}


def _title(model: ServedModel) -> str:
    return next(iter(model.names), model.engine)


@router.get("/version")
async def version(request: Request) -> dict[str, Any]:
    versions = {model.status.get("version") for model in _models(request)}
    return {"version": __version__, "engine_version": next(iter(versions), None)}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Triton's exposition, if its address was given, and the proxy's over all workers."""
    state = request.app.state
    settings: ProxySettings = state.settings
    own: ProxyMetrics = state.metrics
    triton = await _scrape(settings.triton_metrics) if settings.triton_metrics else b""
    ready = any(model.unready_reason is None for model in _models(request))
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
