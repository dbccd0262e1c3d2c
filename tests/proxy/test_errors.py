"""Every refusal: its status, its fields, one shape, and the server answers the next request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.proxy.fakes import MODEL, FakeSession, Reply, ended, running_proxy
from tests.waiting import PATIENCE
from tridentlm.errors import (
    ContextLengthExceeded,
    EngineDown,
    InternalError,
    InvalidRequest,
    Overloaded,
)
from tridentlm_client import End

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


def check_error(response: httpx.Response, status: int, kind: str, param: Any, code: Any) -> str:
    """Checks the one error shape and returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found = (body["error"]["type"], body["error"]["param"], body["error"]["code"])
    assert found == (kind, param, code)
    return str(body["error"]["message"])


@pytest.fixture(autouse=True)
def serves_the_next_request(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the same server must still answer."""
    if "http" not in request.fixturenames:
        yield
        return
    session, http = (request.getfixturevalue(name) for name in ("session", "http"))
    yield
    fresh = FakeSession()
    session.reply, session.ready, session.status = fresh.reply, True, fresh.status
    assert http.post(CHAT, json={"messages": USER}).status_code == 200


CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": USER, "temperature": -1}, "temperature"),
    ({"messages": USER, "temperature": "hot"}, "temperature"),
    ({"messages": USER, "top_p": 0}, "top_p"),
    ({"messages": USER, "top_k": -2}, "top_k"),
    ({"messages": USER, "min_p": 2}, "min_p"),
    ({"messages": USER, "seed": 0.5}, "seed"),
    ({"messages": USER, "max_tokens": 0}, "max_tokens"),
    ({"messages": USER, "max_tokens": -1}, "max_tokens"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": USER, "stop": ""}, "stop"),
    ({"messages": USER, "stop": ["a", 1]}, "stop"),
    ({"messages": USER, "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"messages": USER, "timeout": 0}, "timeout"),
    ({"messages": USER, "stream": "yes"}, "stream"),
    ({"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": USER, "stream": True, "stream_options": 1}, "stream_options"),
    ({"messages": USER, "chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"messages": USER, "model": 5}, "model"),
]


@pytest.mark.parametrize(("body", "param"), CHAT_REFUSALS)
def test_bad_chat_fields_are_400_naming_the_field(
    http: httpx.Client, session: FakeSession, body: dict[str, Any], param: str
) -> None:
    message = check_error(http.post(CHAT, json=body), 400, "invalid_request_error", param, None)
    assert param in message
    assert session.submissions == []


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [], {}, [[]], ["a", 1], [1, "a"], [1.5], [True], [-1], [2**31], [[1], "a", None]],
)
def test_bad_prompts_are_400(http: httpx.Client, prompt: object) -> None:
    response = http.post(COMPLETIONS, json={"prompt": prompt})
    check_error(response, 400, "invalid_request_error", "prompt", None)


def test_too_many_prompts_are_400(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"prompt": ["a"] * 1025})
    assert "1025" in check_error(response, 400, "invalid_request_error", "prompt", None)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_images_and_audio_are_refused_by_name(http: httpx.Client, kind: str) -> None:
    content = [{"type": "text", "text": "What?"}, {"type": kind, kind: {"url": "data:,"}}]
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
    message = check_error(response, 400, "invalid_request_error", "messages[0].content[1]", None)
    assert kind in message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"messages": NaN}', b"\xff\xfe", b'{"a": "\\ud800"}', b"[1]", b"5"],
)
def test_broken_json_is_400(http: httpx.Client, body: bytes) -> None:
    response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    check_error(response, 400, "invalid_request_error", None, "invalid_json")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("model", ["gpt-4", "", MODEL + ":adapter"])
def test_unknown_models_are_404(http: httpx.Client, path: str, model: str) -> None:
    body = {"model": model, "messages": USER, "prompt": "x"}
    message = check_error(
        http.post(path, json=body), 404, "invalid_request_error", "model", "model_not_found"
    )
    assert MODEL in message
    assert ("LoRA" in message) == model.endswith(":adapter")


def test_unknown_model_id_is_404(http: httpx.Client) -> None:
    response = http.get("/v1/models/gpt-4")
    check_error(response, 404, "invalid_request_error", "model", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/v1/images", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", COMPLETIONS, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_methods(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    response = http.request(method, path)
    check_error(response, status, "invalid_request_error", None, code)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_other_media_types_are_415(http: httpx.Client, headers: dict[str, str]) -> None:
    response = http.post(CHAT, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_json_with_a_charset_is_served(http: httpx.Client) -> None:
    kind = {"content-type": "application/json; charset=utf-8"}
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    assert http.post(CHAT, content=body, headers=kind).status_code == 200


def test_a_50_mb_body_is_413(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * (50 << 20) + b'"}'
    response = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    check_error(response, 413, "invalid_request_error", None, "content_too_large")


def test_a_huge_value_is_not_sent_back(http: httpx.Client) -> None:
    for field in ("model", "stream", "temperature"):
        response = http.post(CHAT, json={"messages": USER, field: "x" * 500_000})
        assert response.status_code in (400, 404)
        assert len(response.content) < 2000


def test_a_chunked_body_without_a_length_is_limited_too(http: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 16)

    response = http.post(CHAT, content=parts(), headers={"content-type": "application/json"})
    check_error(response, 413, "invalid_request_error", None, "content_too_large")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (ContextLengthExceeded("too long", param="max_tokens"), None),
        (InvalidRequest("never fits", param="max_tokens", code="kv_cache_exceeded"), None),
        (Overloaded("The queue is full."), "1"),
        (EngineDown("restarting"), "2"),
        (InternalError("oops"), None),
    ],
)
def test_refused_admissions_keep_their_status(
    http: httpx.Client,
    session: FakeSession,
    error: Any,
    retry_after: str | None,
    stream: bool,
) -> None:
    session.reply = lambda s: Reply(refusal=error)
    response = http.post(CHAT, json={"messages": USER, "stream": stream})
    check_error(response, error.status, error.type, error.param, error.code)
    assert response.headers.get("retry-after") == retry_after


def test_a_chats_prompt_is_called_messages(http: httpx.Client, session: FakeSession) -> None:
    session.reply = lambda s: Reply(refusal=ContextLengthExceeded("too long", param="prompt"))
    kind, code = "invalid_request_error", "context_length_exceeded"
    check_error(http.post(CHAT, json={"messages": USER}), 400, kind, "messages", code)
    session.reply = lambda s: Reply(refusal=ContextLengthExceeded("too long", param="prompt"))
    check_error(http.post(COMPLETIONS, json={"prompt": "x"}), 400, kind, "prompt", code)


def test_one_refused_prompt_refuses_all_and_aborts_its_neighbours(
    http: httpx.Client, session: FakeSession
) -> None:
    def reply(submission: Any) -> Reply:
        bad = submission.prompt == "bad"
        return Reply(refusal=Overloaded("full") if bad else None, steps=[3600.0])

    session.reply = reply
    response = http.post(COMPLETIONS, json={"prompt": ["a", "bad", "b"]})
    check_error(response, 503, "overloaded_error", None, "overloaded")
    assert len(session.aborted) == 2


def test_an_engine_that_dies_under_a_whole_request_is_503(
    http: httpx.Client, session: FakeSession
) -> None:
    session.reply = lambda s: Reply(steps=[End.from_error(EngineDown("died"))])
    response = http.post(CHAT, json={"messages": USER})
    check_error(response, 503, "server_error", None, "engine_down")


def test_a_timeout_is_504_that_clients_do_not_retry(
    http: httpx.Client, session: FakeSession
) -> None:
    session.reply = lambda s: Reply(steps=[ended("abort")])
    response = http.post(CHAT, json={"messages": USER, "timeout": 1.5})
    assert "1.5 s" in check_error(response, 504, "timeout_error", None, "timeout")
    assert response.headers["x-should-retry"] == "false"


def test_an_abort_that_nobody_asked_for_is_503(http: httpx.Client, session: FakeSession) -> None:
    session.reply = lambda s: Reply(steps=[ended("abort")])
    response = http.post(CHAT, json={"messages": USER})
    check_error(response, 503, "server_error", None, "engine_down")


def test_a_fault_of_the_proxy_is_500_in_the_same_shape(
    http: httpx.Client, session: FakeSession
) -> None:
    def fail(submission: Any) -> Reply:
        raise ZeroDivisionError("secret detail")

    session.reply = fail
    response = http.post(CHAT, json={"messages": USER})
    message = check_error(response, 500, "server_error", None, "internal_error")
    assert "secret" not in message


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (None, "no connection"),
        ({"model": MODEL, "up": False, "draining": False}, "engine"),
        ({"model": MODEL, "up": True, "draining": True}, "shutting down"),
        ({"model": MODEL, "up": True, "draining": False}, "lost"),
    ],
)
def test_unready_is_503_with_the_reason_and_a_time(
    http: httpx.Client, session: FakeSession, status: Any, reason: str
) -> None:
    session.ready, session.status = False, status
    for response in (
        http.post(CHAT, json={"messages": USER}),
        http.get("/health/ready"),
        http.get("/health"),
    ):
        assert reason in check_error(response, 503, "server_error", None, "engine_down")
        assert response.headers["retry-after"] == "2"
    assert http.get("/health/live").status_code == 200


def test_a_wrong_or_missing_key_is_401_except_for_health_and_metrics() -> None:
    with (
        running_proxy(api_key="right") as proxy,
        httpx.Client(base_url=proxy.url, timeout=PATIENCE) as http,
    ):
        wrong = ("Bearer wrong", "right", "Basic right", "Bearer")
        for given in ({}, *({"authorization": value} for value in wrong)):
            for response in (
                http.post(CHAT, json={"messages": USER}, headers=given),
                http.get("/v1/models", headers=given),
                http.get("/nothing", headers=given),
            ):
                check_error(response, 401, "invalid_request_error", None, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer"):  # RFC 9110: its case does not matter
            key = {"authorization": f"{scheme} right"}
            assert http.post(CHAT, json={"messages": USER}, headers=key).status_code == 200
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):
            assert http.get(path).status_code == 200
