"""`create_app`: the FastAPI application of one proxy process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from openai_proxy.catalogue import open_catalogue
from openai_proxy.errors import on_http_exception
from openai_proxy.generate import GenerateEndpoint
from openai_proxy.metrics import ProxyMetrics
from openai_proxy.middleware import OPEN_PATHS, Gate
from openai_proxy.models import CatalogueFactory, Models, SessionFactory, TextFactory
from openai_proxy.openapi import describe
from openai_proxy.parameters import IgnoredParameters
from openai_proxy.protocol import parse_chat, parse_completion
from openai_proxy.rawgenerate import RawGenerateEndpoint
from openai_proxy.recorder import FailureRecorder
from openai_proxy.responses.endpoint import ResponsesEndpoint
from openai_proxy.responses.endpoint import router as responses_router
from openai_proxy.responses.store import ResponseStore
from openai_proxy.routes import router
from openai_proxy.sessions import open_session
from openai_proxy.settings import ProxySettings
from openai_proxy.textservice import TextService
from openai_proxy.tokenize import TokenizeEndpoint
from tridentlm import __version__
from tridentlm.startup import settle

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"
RESPONSES_PATH = "/v1/responses"
GENERATE_PATH = "/generate"
CONNECT_SECONDS = 3.0


def create_app(
    settings: ProxySettings,
    session_factory: SessionFactory = open_session,
    text_factory: TextFactory = TextService,
    catalogue_factory: CatalogueFactory = open_catalogue,
) -> FastAPI:
    """The models and their sessions are made with the application, in its event loop.

    The application accepts connections once they are connected, so that a new worker beside others
    refuses nobody; after CONNECT_SECONDS it does so anyway, and answers 503 until they are.
    """
    app = FastAPI(
        title="TridentLM", version=__version__, lifespan=_lifespan, redirect_slashes=False
    )
    app.state.settings = settings
    app.state.open_models = partial(
        Models, settings, session_factory, text_factory, catalogue_factory
    )
    app.state.metrics = ProxyMetrics()
    app.state.ignored = IgnoredParameters()
    app.state.responses = ResponseStore(settings)
    posts: dict[str, Callable[..., Any]] = {
        CHAT_PATH: GenerateEndpoint(parse_chat, settings, app.state),
        COMPLETIONS_PATH: GenerateEndpoint(parse_completion, settings, app.state),
        RESPONSES_PATH: ResponsesEndpoint(settings, app.state, app.state.responses),
        GENERATE_PATH: RawGenerateEndpoint(settings, app.state),
        TOKENIZE_PATH: TokenizeEndpoint(settings, app.state, detokenize=False),
        DETOKENIZE_PATH: TokenizeEndpoint(settings, app.state, detokenize=True),
    }
    for path, endpoint in posts.items():
        app.router.routes.insert(0, Route(path, endpoint, methods=["POST"]))
    app.include_router(router)
    app.include_router(responses_router)
    describe(app, settings.api_key)
    app.add_exception_handler(HTTPException, on_http_exception)
    known = OPEN_PATHS | posts.keys() | {"/v1/models", "/version", "/v1/embeddings"}
    _wrap(app, settings, frozenset(known))
    return app


def _wrap(app: FastAPI, settings: ProxySettings, routes: frozenset[str]) -> None:
    """Puts `Gate` in the place of Starlette's outermost layer, which every event would pass."""
    build = app.build_middleware_stack
    recorder = FailureRecorder(folder) if (folder := settings.record_failures) else None

    def wrapped() -> ASGIApp:
        outermost = build()
        assert isinstance(outermost, ServerErrorMiddleware), "what Starlette begins with"
        gate: ASGIApp = Gate(
            outermost.app,
            api_key=settings.api_key,
            metrics=app.state.metrics,
            routes=routes,
            recorder=recorder,
        )
        if not settings.cors_origins:
            return gate
        return CORSMiddleware(
            gate,
            allow_origins=[origin.strip() for origin in settings.cors_origins.split(",")],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-tridentlm-ignored-params", "retry-after"],
        )

    app.build_middleware_stack = wrapped  # type: ignore[method-assign]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    models: Models = app.state.open_models()
    app.state.models = models
    connecting = asyncio.create_task(models.connected())
    try:
        await asyncio.wait({connecting}, timeout=CONNECT_SECONDS)
        settle()
        yield
    finally:
        connecting.cancel()
        await models.close()
