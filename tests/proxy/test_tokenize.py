"""/tokenize and /detokenize, and the fields of a request that concern the chat template."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.proxy.fakes import MODEL, FakeSession, FakeText, running_proxy
from tests.waiting import PATIENCE
from tridentlm.errors import EngineDown, InvalidRequest

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def test_a_prompt_becomes_counted_ids(http: httpx.Client, text: FakeText) -> None:
    text.replies["tokenize"] = {"tokens": [1, 2, 3]}
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "a b"}).json()
    assert answer == {"count": 3, "max_model_len": 128, "tokens": [1, 2, 3], "token_strs": None}
    asked = {"prompt": "a b", "add_special_tokens": True, "return_token_strs": False}
    assert text.asked == [("tokenize", asked)]


def test_messages_go_through_the_template_with_all_its_options(
    http: httpx.Client, text: FakeText
) -> None:
    text.replies["tokenize"] = {"tokens": [1], "token_strs": ["x"]}
    body = {
        "messages": USER,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "return_token_strs": True,
    }
    assert http.post("/tokenize", json=body).json()["token_strs"] == ["x"]
    [(_, asked)] = text.asked
    assert asked["messages"] == USER
    assert asked["chat_template_kwargs"] == {
        "enable_thinking": False,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def test_detokenize_gives_the_text(http: httpx.Client, text: FakeText) -> None:
    text.replies["detokenize"] = {"prompt": "a b"}
    assert http.post("/detokenize", json={"tokens": [1, 2]}).json() == {"prompt": "a b"}
    assert text.asked == [("detokenize", {"tokens": [1, 2], "skip_special_tokens": False})]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": 3}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": USER, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("no", param="tokens"), 400), (EngineDown("gone"), 503)]
)
def test_the_tokenizers_errors_reach_the_client(
    http: httpx.Client, text: FakeText, error: Exception, status: int
) -> None:
    text.replies["detokenize"] = error
    response = http.post("/detokenize", json={"tokens": [1]})
    assert response.status_code == status
    assert response.json()["error"]["message"] in ("no", "gone")


def test_unknown_fields_are_named(http: httpx.Client, text: FakeText) -> None:
    text.replies["detokenize"] = {"prompt": ""}
    response = http.post("/detokenize", json={"tokens": [], "zeta": 1})
    assert response.headers["x-tridentlm-ignored-params"] == "zeta"


def test_template_options_of_a_chat_reach_the_template(
    http: httpx.Client, session: FakeSession
) -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"continue_final_message": False, "x": 1},
    }
    assert http.post(CHAT, json=body).status_code == 200
    kwargs = {"continue_final_message": True, "add_generation_prompt": False, "x": 1}
    assert session.submissions[-1].chat_template_kwargs == kwargs


def test_continuing_and_prompting_exclude_each_other(http: httpx.Client) -> None:
    body = {"messages": USER, "continue_final_message": True, "add_generation_prompt": True}
    response = http.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


def test_a_requests_template_is_refused_unless_it_is_trusted(http: httpx.Client) -> None:
    body = {"messages": USER, "chat_template": "{{ messages }}"}
    response = http.post(CHAT, json=body)
    assert response.status_code == 400
    assert "--trust-request-chat-template" in response.json()["error"]["message"]
    with running_proxy(trust_request_chat_template=True) as proxy:
        assert httpx.post(f"{proxy.url}{CHAT}", json=body, timeout=PATIENCE).status_code == 200
        assert proxy.session.submissions[-1].chat_template == "{{ messages }}"
        wrong = {**body, "chat_template": 3}
        bad = httpx.post(f"{proxy.url}{CHAT}", json=wrong, timeout=PATIENCE)
        assert bad.json()["error"]["param"] == "chat_template"
