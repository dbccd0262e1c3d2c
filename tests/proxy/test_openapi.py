"""The OpenAPI document against the server: what it allows is never a 500, and every error is one
object of four fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from openai_proxy.app import create_app
from openai_proxy.settings import ProxySettings
from tests.proxy.fakes import Proxy, running_proxy
from tests.waiting import PATIENCE

CHECKS = [response_schema_conformance, status_code_conformance, content_type_conformance]
WITH_BODY = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/generate",
    "/tokenize",
    "/detokenize",
]
OPERATIONS = [
    *(("POST", path) for path in WITH_BODY),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/version"),
]


@pytest.fixture(scope="module")
def quick() -> Iterator[Proxy]:
    with running_proxy() as proxy:
        proxy.text.replies["tokenize"] = {"tokens": [1, 2]}
        proxy.text.replies["detokenize"] = {"prompt": "a b"}
        proxy.text.template = "{{ tools }}<tool_call><think></think>"
        yield proxy


@pytest.fixture(scope="module")
def document(quick: Proxy) -> Any:
    return httpx.get(f"{quick.url}/openapi.json", timeout=PATIENCE).json()


def test_every_operation_is_tried(document: Any) -> None:
    found = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    assert sorted(found) == sorted(OPERATIONS)


def test_errors_are_described_as_they_are(document: Any) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/ErrorBody"}
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert "securitySchemes" not in document["components"]


def test_a_key_is_asked_for_where_it_is_needed() -> None:
    document = create_app(ProxySettings(api_key="secret")).openapi()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            needs = path not in ("/health", "/health/live", "/health/ready", "/metrics")
            assert ("security" in operation) == needs
    assert "secret" not in str(document)


TRIED = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS] + [
    ("POST", path, GenerationMode.NEGATIVE) for path in WITH_BODY
]


@pytest.mark.parametrize(("method", "path", "mode"), TRIED)
def test_no_500_and_one_shape_of_error(
    quick: Proxy, document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path][method]
    examples = 12 if operation.body else 3

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(base_url=quick.url, timeout=PATIENCE)
        check(response)
        case.validate_response(response, checks=CHECKS)

    run()


def check(response: Any) -> None:
    assert response.status_code not in (500, 502, 504), response.text
    if response.status_code < 400:
        return
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
