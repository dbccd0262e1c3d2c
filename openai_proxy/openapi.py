"""The OpenAPI document: the raw ASGI endpoints in it, and every error as it really is."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from openai_proxy.answerschemas import (
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    ErrorBody,
    GenerateResponse,
    ResponseObject,
    TokenizeResponse,
)
from openai_proxy.middleware import OPEN_PATHS
from openai_proxy.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    ResponseRequest,
    TokenizeRequest,
)

_REF = "#/components/schemas/{model}"
_EVENTS = (
    "Lines `data: JSON`, each followed by an empty one; an error is an event of its own shape."
)


_POSTS: dict[str, tuple[str, type[BaseModel], type[BaseModel]]] = {
    "/v1/chat/completions": ("Create a chat completion", ChatCompletionRequest, ChatCompletion),
    "/v1/completions": ("Create a completion", CompletionRequest, Completion),
    "/v1/responses": ("Create a response", ResponseRequest, ResponseObject),
    "/generate": ("Text in, text out", GenerateRequest, GenerateResponse),
    "/tokenize": ("Token ids of a prompt or of messages", TokenizeRequest, TokenizeResponse),
    "/detokenize": ("The text of token ids", DetokenizeRequest, DetokenizeResponse),
}


def describe(app: FastAPI, api_key: str) -> None:
    """Adds to what `app.openapi()` returns the raw endpoints, the one shape of errors in place of
    FastAPI's own, and the key."""
    generate = app.openapi
    models: list[type[BaseModel]] = [ErrorBody]
    for _, request, response in _POSTS.values():
        models += (request, response)

    def openapi() -> dict[str, Any]:
        document = generate()
        if not _POSTS.keys() <= document["paths"].keys():
            _, definitions = models_json_schema(
                [(model, "validation") for model in models], ref_template=_REF
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            for path, (summary, request, response) in _POSTS.items():
                document["paths"][path] = {"post": _operation(summary, request, response)}
            _tell_errors(document)
            if api_key:
                _tell_key(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _tell_errors(document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "Any error",
                "content": _content(ErrorBody),
            }
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _tell_key(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values() if path not in OPEN_PATHS else ():
            operation["security"] = [{"key": []}]


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def _operation(summary: str, request: type[BaseModel], response: type[BaseModel]) -> dict[str, Any]:
    streams = "stream" in request.model_fields
    events = {"text/event-stream": {"schema": {"description": _EVENTS}}} if streams else {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _content(request)},
        "responses": {
            "200": {
                "description": "The answer; server-sent events with stream=true."
                if streams
                else "The answer.",
                "content": _content(response) | events,
            },
        },
    }
