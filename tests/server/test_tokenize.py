"""Tokens and templates through the proxy and a real Triton, against the tokenizer itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.service import Service
from tests.waiting import PATIENCE
from tridentlm.config import EngineSettings
from tridentlm.hub import default_model, resolve_model
from tridentlm.text import Tokenizer

pytestmark = pytest.mark.server
MESSAGES = [{"role": "user", "content": "What is 7 + 5?"}]
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ extra }}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model(EngineSettings()))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ["--runner", "simulated", "--model", str(default_model())]
    flags += ["--trust-request-chat-template"]
    with Service(tmp_path_factory.mktemp("tokenize"), *flags) as made:
        yield made


def post(service: Service, path: str, **body: Any) -> Any:
    response = httpx.post(service.url + path, json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", ["", "Once upon a time", "<|im_start|>x", "é 한국어 🙂\n"])
def test_text_to_ids_and_back(service: Service, tokenizer: Tokenizer, text: str) -> None:
    answer = post(service, "/tokenize", prompt=text, return_token_strs=True)
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == service.status()["max_model_len"]
    assert post(service, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}


def test_special_tokens_are_skipped_when_asked(service: Service, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>x")
    skipped = post(service, "/detokenize", tokens=ids, skip_special_tokens=True)
    assert skipped == {"prompt": "x"}


def test_a_chats_ids_are_those_that_the_engine_gets(service: Service, tokenizer: Tokenizer) -> None:
    answer = post(service, "/tokenize", messages=MESSAGES)
    assert answer["tokens"] == tokenizer.encode_chat(MESSAGES)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        chat = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1)
    assert chat.usage.prompt_tokens == answer["count"]


def test_the_final_message_is_continued(service: Service, tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The sum is"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    answer = post(service, "/tokenize", messages=messages, **options)
    assert tokenizer.decode(answer["tokens"]).endswith("The sum is")
    chat = post(service, "/v1/chat/completions", messages=messages, max_tokens=1, **options)
    assert chat["usage"]["prompt_tokens"] == answer["count"]


def test_a_requests_own_template_is_used(service: Service, tokenizer: Tokenizer) -> None:
    fields = {"chat_template": TEMPLATE, "chat_template_kwargs": {"extra": "!"}}
    answer = post(service, "/tokenize", messages=MESSAGES, **fields)
    assert tokenizer.decode(answer["tokens"]) == "[What is 7 + 5?]!"
    chat = post(service, "/v1/chat/completions", messages=MESSAGES, max_tokens=1, **fields)
    assert chat["usage"]["prompt_tokens"] == answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{% if %}"}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template": "{{ 1/0 }}"}, "messages"),
    ],
)
def test_what_cannot_be_done_is_a_400(
    service: Service, path: str, body: dict[str, Any], param: str
) -> None:
    response = httpx.post(service.url + path, json=body, timeout=PATIENCE)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_plain_triton_client_reaches_the_tokenizer(service: Service, tmp_path: Path) -> None:
    """KServe's HTTP, as anybody could send it."""
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [data]}
        for name, data in (("op", "tokenize"), ("request", '{"prompt": "Hi"}'))
    ]
    url = f"{service.triton_url}/v2/models/tokenizer/infer"
    response = httpx.post(url, json={"inputs": inputs}, timeout=PATIENCE)
    assert response.status_code == 200, response.text
