"""Which fields are served, accepted as labels, refused as not built, or ignored and reported."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from tests.proxy.fakes import MODEL, FakeSession, running_proxy
from tests.waiting import PATIENCE
from tridentlm_client import Submission

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]
IGNORED = "x-tridentlm-ignored-params"


def ask(http: httpx.Client, path: str = CHAT, **fields: Any) -> httpx.Response:
    asks = {"messages": USER} if path == CHAT else {"prompt": "x"}
    return http.post(path, json={**asks, **fields})


def test_sampling_fields_reach_the_engine(http: httpx.Client, session: FakeSession) -> None:
    sampling = {
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "ignore_eos": True,
        "stop": ["a", "b"],
        "stop_token_ids": [1],
        "skip_special_tokens": False,
        "timeout": 3.5,
        "cache_salt": "tenant",
        "priority": -3,
        "user": "me",
    }
    for path in (CHAT, COMPLETIONS):
        assert ask(http, path, **sampling).status_code == 200
        assert session.submissions[-1].sampling == sampling


def test_messages_reach_the_engine_as_plain_text(http: httpx.Client, session: FakeSession) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    kwargs = {"enable_thinking": False}
    body = {"messages": messages, "chat_template_kwargs": kwargs}
    assert http.post(CHAT, json=body).status_code == 200
    assert session.submissions[-1] == Submission(
        messages=[messages[0], {"role": "user", "content": "a\nb"}], chat_template_kwargs=kwargs
    )


def test_null_means_unset(http: httpx.Client, session: FakeSession) -> None:
    names = ("model", "max_tokens", "temperature", "stop", "seed", "stream", "stream_options", "n")
    names += ("logprobs", "tools", "response_format", "chat_template_kwargs", "return_token_ids")
    response = ask(http, **dict.fromkeys(names))
    assert response.status_code == 200
    assert IGNORED not in response.headers
    assert session.submissions[-1] == Submission(messages=USER)


def test_the_default_length_is_open_in_chat_and_16_in_completions(
    http: httpx.Client, session: FakeSession
) -> None:
    ask(http)
    ask(http, COMPLETIONS)
    assert [s.sampling for s in session.submissions] == [{}, {"max_tokens": 16}]


def test_max_completion_tokens_wins_over_max_tokens(
    http: httpx.Client, session: FakeSession
) -> None:
    ask(http, max_completion_tokens=9, max_tokens=3)
    assert session.submissions[-1].sampling == {"max_tokens": 9}


def test_the_servers_timeout_holds_where_the_request_names_none() -> None:
    with (
        running_proxy(timeout=5.0) as proxy,
        httpx.Client(base_url=proxy.url, timeout=PATIENCE) as http,
    ):
        ask(http)
        ask(http, timeout=9)
        assert [s.sampling["timeout"] for s in proxy.session.submissions] == [5.0, 9]


def test_the_model_may_be_left_out_or_named(http: httpx.Client) -> None:
    assert ask(http).json()["model"] == MODEL
    assert ask(http, model=MODEL).json()["model"] == MODEL


NOT_BUILT: list[tuple[str, Any, list[Any]]] = [
    ("best_of", 2, [1]),
    ("functions", [{"name": "f"}], [[]]),
    ("function_call", {"name": "f"}, ["none", "auto"]),
    ("regex", "a+", []),
    ("ebnf", "root", []),
    ("suffix", "end", [""]),
    ("modalities", ["text", "audio"], [["text"]]),
    ("audio", {"voice": "x"}, []),
    ("reasoning_effort", "high", []),
    ("store", True, [False]),
    ("service_tier", "flex", ["auto", "default"]),
    ("prompt_embeds", "AAAA", []),
    ("lora_path", "x", []),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("name", "value", "off"), NOT_BUILT)
def test_what_is_not_built_is_refused_unless_it_is_off(
    http: httpx.Client, session: FakeSession, path: str, name: str, value: Any, off: list[Any]
) -> None:
    response = ask(http, path, **{name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert session.submissions == []
    for harmless in off:
        response = ask(http, path, **{name: harmless})
        assert response.status_code == 200
        assert IGNORED not in response.headers


def test_labels_are_accepted_and_not_reported(http: httpx.Client) -> None:
    response = ask(http, metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k")
    assert response.status_code == 200
    assert IGNORED not in response.headers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/generate"])
def test_a_request_is_its_users_by_openais_old_name_or_its_new_one(
    http: httpx.Client, session: FakeSession, path: str
) -> None:
    prompt: dict[str, Any] = {
        CHAT: {"messages": USER},
        COMPLETIONS: {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/generate": {"text_input": "x"},
    }[path]
    names: list[tuple[dict[str, Any], str | None]] = [
        ({"user": "old"}, "old"),
        ({"safety_identifier": "new"}, "new"),
        ({"user": "old", "safety_identifier": "new"}, "old"),
        ({}, None),
    ]
    for fields, user in names:
        assert http.post(path, json=prompt | fields).status_code == 200
        assert session.submissions[-1].sampling.get("user") == user
    refused = http.post(path, json=prompt | {"user": 7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "user")


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_served_and_named_in_a_header(http: httpx.Client, stream: bool) -> None:
    response = ask(http, stream=stream, zeta=1, alpha={"x": 1}, **{"we ird\n": 2})
    assert response.status_code == 200
    assert response.headers[IGNORED] == "alpha,?,zeta"


def test_unknown_stream_options_are_named_too(http: httpx.Client) -> None:
    response = ask(http, stream=True, stream_options={"include_obfuscation": False})
    assert response.headers[IGNORED] == "stream_options.include_obfuscation"


def test_a_field_of_the_other_endpoint_is_named(http: httpx.Client) -> None:
    assert ask(http, COMPLETIONS, messages=USER).headers[IGNORED] == "messages"
    assert ask(http, CHAT, prompt="x").headers[IGNORED] == "prompt"


def test_very_many_unknown_fields_are_counted(http: httpx.Client) -> None:
    response = ask(http, **{f"f{i:03d}": 1 for i in range(100)})
    named = response.headers[IGNORED].split(",")
    assert len(named) == 21
    assert named[-1] == "+80"


def test_an_unknown_field_is_logged_once(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "openai_proxy"):
        for _ in range(3):
            ask(http, seen_for_the_first_time=1)
    lines = [r for r in caplog.records if "seen_for_the_first_time" in r.getMessage()]
    assert len(lines) == 1
