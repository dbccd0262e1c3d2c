"""The POST endpoints, which are raw ASGI, in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from openai_proxy.schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorBody,
    GenerateRequest,
    GenerateResponse,
    ResponseObject,
    ResponseRequest,
    TokenizeRequest,
    TokenizeResponse,
)

_REF = "#/components/schemas/{model}"


_POSTS: dict[str, tuple[str, type[BaseModel], type[BaseModel]]] = {
    "/v1/chat/completions": ("Create a chat completion", ChatCompletionRequest, ChatCompletion),
    "/v1/completions": ("Create a completion", CompletionRequest, Completion),
    "/v1/responses": ("Create a response", ResponseRequest, ResponseObject),
    "/generate": ("Text in, text out", GenerateRequest, GenerateResponse),
    "/tokenize": ("Token ids of a prompt or of messages", TokenizeRequest, TokenizeResponse),
    "/detokenize": ("The text of token ids", DetokenizeRequest, DetokenizeResponse),
}


def describe_posts(app: FastAPI) -> None:
    """Adds the POST endpoints, which are raw ASGI, to what `app.openapi()` returns."""
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
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _operation(summary: str, request: type[BaseModel], response: type[BaseModel]) -> dict[str, Any]:
    def content(model: type[BaseModel], kind: str = "application/json") -> dict[str, Any]:
        return {kind: {"schema": {"$ref": _REF.format(model=model.__name__)}}}

    streams = "stream" in request.model_fields
    events = {"text/event-stream": {"schema": {"description": "Events"}}} if streams else {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content(request)},
        "responses": {
            "200": {
                "description": "The answer; server-sent events with stream=true."
                if streams
                else "The answer.",
                "content": content(response) | events,
            },
            "default": {"description": "Any error", "content": content(ErrorBody)},
        },
    }
