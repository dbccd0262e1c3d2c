"""Two models in one Triton behind one proxy: each its own tokenizer, template, weights and fate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.factory import make_tiny_model
from tests.server.reference import Reference
from tests.server.service import Service
from tests.waiting import PATIENCE, command_line, wait_until
from tridentlm.config import EngineSettings
from tridentlm.hub import resolve_model
from tridentlm.text import Tokenizer

pytestmark = pytest.mark.server
OWN_TEMPLATE = (
    "{% for m in messages %}<<{{ m.content }}>>{% endfor %}{% if tools %}<tool_call>{% endif %}"
)
MESSAGES: list[Any] = [{"role": "user", "content": "What is it?"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    alpha = make_tiny_model("llama", root / "alpha")
    beta = make_tiny_model("qwen3", root / "Beta.2", seed=1)
    (beta / "chat_template.jinja").write_text(OWN_TEMPLATE)
    return {"alpha": alpha, "beta": beta}


@pytest.fixture(scope="module")
def service(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    flags = [f"--model={folder}" for folder in folders.values()]
    flags += ["--served-model-name=alpha,gpt-4", "--served-model-name=beta"]
    flags += ["--kv-memory-gb=0.1", "--threads=1"]
    with Service(tmp_path_factory.mktemp("service"), *flags) as service:
        yield service
    assert service.process is not None
    assert service.process.returncode == 0, service.log_text()


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_every_model_is_listed_with_its_aliases(client: openai.OpenAI) -> None:
    assert sorted(model.id for model in client.models.list()) == ["alpha", "beta", "gpt-4"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_each_answers_with_its_own_weights_and_template(
    client: openai.OpenAI, folders: dict[str, Path], name: str
) -> None:
    tokenizer = Tokenizer.load(resolve_model(EngineSettings(model=str(folders[name]))))
    prompt = tokenizer.encode_chat(MESSAGES)
    answer = client.chat.completions.create(
        model=name,
        messages=MESSAGES,
        max_tokens=16,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert answer.model == name
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    extra = answer.choices[0].model_extra
    assert extra is not None
    Reference(folders[name]).check_greedy(prompt, list(extra["token_ids"]), name)


def test_tools_go_by_each_models_template(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2}
    client.chat.completions.create(model="beta", **fields)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="alpha", **fields)


def test_plain_triton_clients_reach_the_second_model_too(service: Service) -> None:
    body = {"text_input": "Hello", "max_tokens": 3, "stream": False}
    for ensemble in ("generate", "beta_generate"):
        url = f"{service.triton_url}/v2/models/{ensemble}/generate"
        answer = httpx.post(url, json=body, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        assert answer.json()["finish_reason"] in ("length", "stop")


def test_one_engine_process_dies_and_the_other_model_goes_on(service: Service) -> None:
    models = {"alpha": "ready", "beta": "ready"}
    assert health(service) == models
    with httpx.stream(
        "POST",
        f"{service.url}/v1/completions",
        json={"model": "alpha", "prompt": "a", "max_tokens": 500, "stream": True}
        | {"ignore_eos": True},
        timeout=PATIENCE,
    ) as running:
        lines = running.iter_lines()
        next(lines)
        engine_process(service, "beta_engine").kill()
        wait_until(lambda: health(service)["beta"] != "ready", PATIENCE, "the loss is told")
        assert health(service)["alpha"] == "ready"
        assert service.chat(model="beta").status_code == 503
        assert service.chat(model="gpt-4").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"
    wait_until(lambda: health(service) == models, 2 * PATIENCE, "the lost engine is back")
    assert service.chat(model="beta").status_code == 200


def test_one_stub_dies_and_the_other_model_goes_on(service: Service) -> None:
    service.find("triton_python_backend_stub", "/beta_engine/1/model.py").kill()
    wait_until(lambda: health(service)["beta"] != "ready", PATIENCE, "the loss is told")
    assert service.chat(model="alpha").status_code == 200
    wait_until(lambda: health(service)["beta"] == "ready", 2 * PATIENCE, "the lost stub is back")
    assert service.chat(model="beta").status_code == 200


def health(service: Service) -> dict[str, str]:
    answer = httpx.get(f"{service.url}/health/ready", timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["models"])


def engine_process(service: Service, engine: str) -> psutil.Process:
    stub = service.find("triton_python_backend_stub", f"/{engine}/1/model.py")
    [worker] = [p for p in stub.children() if "tridentlm.worker" in command_line(p)]
    return worker
