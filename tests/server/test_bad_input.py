"""Bad input through the whole stack: status, type, param and code; the next request is answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.service import Service
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.server
KEY = "sesame"
MESSAGES = [{"role": "user", "content": "Hi"}]
CONTEXT, PAGES, PAGE = 8192, 128, 16


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A small KV cache and queue, and a key."""
    flags = ["--runner", "simulated", "--num-pages", str(PAGES), "--max-running", "8"]
    flags += ["--max-queue", "20", "--api-key", KEY]
    with Service(tmp_path_factory.mktemp("bad"), *flags) as made:
        yield made


def post(service: Service, body: Any, *, key: str = KEY, **options: Any) -> httpx.Response:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    url = f"{service.url}/v1/chat/completions"
    return httpx.post(url, headers=headers, timeout=60, **content, **options)


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 4, **fields}


CASES: list[tuple[Any, int, str | None, str | None]] = [
    (body(model="nobody"), 404, "model", "model_not_found"),
    (b'{"messages": [', 400, None, "invalid_json"),
    ({"max_tokens": 4}, 400, "messages", None),
    (body(messages=[]), 400, "messages", None),
    (body(messages=[{"role": "nobody", "content": "x"}]), 400, "messages[0].role", None),
    (body(temperature=-1), 400, "temperature", None),
    (body(max_tokens=0), 400, "max_tokens", None),
    (body(max_tokens=-1), 400, "max_tokens", None),
    (
        body(messages=[{"role": "user", "content": "word " * 9000}]),
        400,
        "messages",
        "context_length_exceeded",
    ),
    (body(max_tokens=CONTEXT), 400, "max_tokens", "context_length_exceeded"),
    (body(max_tokens=PAGES * PAGE), 400, "max_tokens", "kv_cache_exceeded"),
    (body(top_p=0.5), 400, "top_p", "unsupported_parameter"),  # by an engine without logits
    (body(presence_penalty=1), 400, "presence_penalty", "unsupported_parameter"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("sent", "status", "param", "code"), CASES)
def test_bad_input_is_refused_with_its_reason_and_the_next_request_works(
    service: Service, sent: Any, status: int, param: str | None, code: str | None, stream: bool
) -> None:
    if isinstance(sent, dict):
        sent = {**sent, "stream": stream}
    answer = post(service, sent)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code)
    assert answer.headers["x-request-id"]
    assert post(service, body()).status_code == 200


def test_a_wrong_key_is_401(service: Service) -> None:
    answer = post(service, body(), key="wrong")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_body_of_50_mb_is_413(service: Service) -> None:
    answer = post(service, b'{"messages": "' + b"x" * (50 << 20) + b'"}')
    assert answer.status_code == 413
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert post(service, body()).status_code == 200


def test_three_hundred_at_once_are_answered_or_refused_with_503_and_retry_after(
    service: Service,
) -> None:
    async def one(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=body(max_tokens=100))

    async def crowd() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            base_url=service.url, headers=headers, limits=limits, timeout=120
        ) as client:
            return await asyncio.gather(*(one(client) for _ in range(300)))

    answers = asyncio.run(crowd())
    counts = Counter(answer.status_code for answer in answers)
    assert set(counts) == {200, 503}
    assert counts[200] >= 28
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
    wait_until(service.idle, PATIENCE, "idle")
    assert post(service, body()).status_code == 200


def test_settings_that_cannot_work_stop_the_start_with_a_reason(tmp_path: Path) -> None:
    service = Service(tmp_path, "--runner", "simulated", "--page-size", "7")
    with pytest.raises(AssertionError, match="page_size must be one of"):
        service.start()
