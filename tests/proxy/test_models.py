"""Several engines behind one proxy: who answers, who is listed, and what one's loss does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from openai_proxy import models
from openai_proxy.app import create_app
from openai_proxy.settings import ProxySettings, format_for
from tests.proxy.fakes import FakeCatalogue, FakeSession, FakeText, eventually, running_app
from tests.waiting import PATIENCE

MESSAGES = [{"role": "user", "content": "Hi"}]
HERMES = "{% if tools %}<tool_call>{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@dataclass
class Several:
    http: httpx.Client
    sessions: dict[str, FakeSession]
    texts: dict[str, FakeText]
    catalogue: FakeCatalogue

    def chat(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})

    def names(self) -> list[str]:
        return [model["id"] for model in self.http.get("/v1/models").json()["data"]]


@contextmanager
def serving(**settings: Any) -> Iterator[Several]:
    """Two engines, `alpha` with two aliases and `beta`."""
    sessions = {"engine": FakeSession(), "b_engine": FakeSession(), "c_engine": FakeSession()}
    texts = {name: FakeText() for name in sessions}
    names = (("engine", "alpha"), ("b_engine", "beta"), ("c_engine", "gamma"))
    for engine, model in names:
        sessions[engine].status = {**(sessions[engine].status or {}), "model": model}
    (sessions["engine"].status or {})["aliases"] = ["a", "org/alpha"]
    catalogue = FakeCatalogue("b_engine", "engine")
    app = create_app(
        ProxySettings(**settings),
        lambda own: sessions[own.engine],
        lambda own: texts[own.engine],
        lambda _: catalogue,
    )
    with running_app(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE) as http:
        yield Several(http, sessions, texts, catalogue)


@pytest.fixture(scope="module")
def shared() -> Iterator[Several]:
    with serving() as several:
        yield several


@pytest.fixture
def several(shared: Several) -> Several:
    for session in shared.sessions.values():
        session.submissions, session.ready = [], True
        session.status = {**(session.status or {}), "up": True}
    return shared


@pytest.mark.parametrize(
    ("name", "engine", "canonical"),
    [
        ("alpha", "engine", "alpha"),
        ("a", "engine", "alpha"),
        ("org/alpha", "engine", "alpha"),
        ("beta", "b_engine", "beta"),
    ],
)
def test_a_request_goes_to_the_model_it_names(
    several: Several, name: str, engine: str, canonical: str
) -> None:
    answer = several.chat(model=name)
    assert answer.json()["model"] == canonical
    assert {e for e, s in several.sessions.items() if s.submissions} == {engine}


def test_every_name_is_listed_and_found(several: Several) -> None:
    assert several.names() == ["alpha", "a", "org/alpha", "beta"]
    for name in several.names():
        assert several.http.get(f"/v1/models/{name}").json()["id"] == name


@pytest.mark.parametrize("name", ["gpt-4", "engine", "b_engine", "alph", "beta:lora"])
def test_an_unknown_name_is_404_and_the_known_ones_are_told(several: Several, name: str) -> None:
    for answer in (several.chat(model=name), several.http.get(f"/v1/models/{name}")):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "model_not_found"
        assert "'alpha', 'a', 'org/alpha', 'beta'" in error["message"]


@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": 3}])
def test_with_several_models_a_request_must_name_one(several: Several, body: Any) -> None:
    answer = several.chat(**body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


def test_the_tokenizer_asked_is_the_models_own(several: Several) -> None:
    for name, engine in (("a", "engine"), ("beta", "b_engine")):
        several.texts[engine].replies = {
            "tokenize": {"tokens": [len(name)]},
            "detokenize": {"prompt": name},
        }
        tokens = several.http.post("/tokenize", json={"model": name, "prompt": "x"})
        assert tokens.json()["tokens"] == [len(name)]
        text = several.http.post("/detokenize", json={"model": name, "tokens": [1]})
        assert text.json() == {"prompt": name}


def test_the_format_of_calls_is_that_of_each_models_template() -> None:
    with serving() as several:
        several.texts["engine"].template = HERMES
        assert several.chat(model="alpha", tools=TOOLS).status_code == 200
        assert several.chat(model="beta", tools=TOOLS).status_code == 400


def test_a_format_can_be_set_for_one_model() -> None:
    with serving(tool_parser="beta=hermes", reasoning_parser="alpha=think,none") as several:
        assert several.chat(model="beta", tools=TOOLS).status_code == 200
        assert several.chat(model="alpha", tools=TOOLS).status_code == 400
    assert format_for("beta=hermes,mistral", "beta") == "hermes"
    assert format_for("mistral,beta=hermes", "alpha") == "mistral"
    assert format_for("beta=hermes", "alpha") == ""


def test_one_lost_engine_leaves_the_other_serving_and_health_says_which(several: Several) -> None:
    assert several.http.get("/health/ready").json() == {
        "status": "ready",
        "models": {"alpha": "ready", "beta": "ready"},
    }
    lost = several.sessions["b_engine"]
    lost.ready, lost.status = False, {**(lost.status or {}), "up": False}
    assert several.chat(model="alpha").status_code == 200
    refused = several.chat(model="beta")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")
    health = several.http.get("/health/ready")
    assert health.status_code == 200
    assert health.json()["status"] == "degraded"
    assert health.json()["models"]["alpha"] == "ready"
    assert "started again" in health.json()["models"]["beta"]
    several.sessions["engine"].ready = False
    health = several.http.get("/health/ready")
    assert health.status_code == 503
    assert "alpha: " in health.json()["error"]["message"]
    assert "beta: " in health.json()["error"]["message"]


def test_engines_that_come_and_go_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(models, "MISSED_LOOKS", 2)
    with serving() as several:
        several.catalogue.engines.append("c_engine")
        eventually(lambda: several.names() == ["alpha", "a", "org/alpha", "beta", "gamma"])
        assert several.chat(model="gamma").status_code == 200
        several.catalogue.engines.remove("b_engine")
        eventually(lambda: "beta" not in several.names())
        assert several.chat(model="beta").status_code == 404
        assert several.sessions["b_engine"].closed
        assert several.chat(model="gamma").status_code == 200


def test_an_engine_that_has_not_spoken_yet_makes_unknown_names_a_503() -> None:
    with serving() as several:
        silent = several.sessions["b_engine"]
        silent.ready, silent.status = False, None
        assert several.chat(model="alpha").status_code == 200
        assert several.chat(model="beta").status_code == 503
        assert several.chat().status_code == 400
        assert several.names() == ["alpha", "a", "org/alpha"]


def test_before_triton_was_heard_everything_is_a_503() -> None:
    with serving() as several:
        for session in several.sessions.values():
            session.ready, session.status = False, None
        for path in ("/v1/models", "/v1/models/alpha", "/health/ready"):
            assert several.http.get(path).status_code == 503
        assert several.chat(model="alpha").status_code == 503
