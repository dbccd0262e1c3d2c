"""The families that `test_openai` leaves out, side by side in one service: greedy throughout."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.factory import make_tiny_model
from tests.server.reference import Reference
from tests.server.service import Service
from tridentlm.config import EngineSettings
from tridentlm.hub import resolve_model
from tridentlm.text import Tokenizer

pytestmark = pytest.mark.server
SERVED = ("mistral", "qwen2", "qwen3_moe")
LENGTHS = (1, 15, 16, 17, 33, 64, 65, 150)  # around a page, Mistral's window and the step's budget


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("families")
    return {family: make_tiny_model(family, home / family) for family in SERVED}


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]
) -> Iterator[Service]:
    flags = [f"--model={folder}" for folder in folders.values()]
    limits = ["--max-step-tokens", "64", "--kv-memory-gb", "0.1", "--threads", "1"]
    with Service(tmp_path_factory.mktemp("served"), *flags, *limits) as service:
        yield service


@pytest.mark.parametrize("family", SERVED)
def test_a_crowd_of_prompts_is_greedy(
    service: Service, folders: dict[str, Path], family: str
) -> None:
    tokenizer = Tokenizer.load(resolve_model(EngineSettings(model=str(folders[family]))))
    text = "Once upon a time there was a small house by the river, and in it lived a fox. "
    prompts = [tokenizer.encode(text * 20)[:length] for length in LENGTHS]

    async def ask(client: openai.AsyncOpenAI, prompt: list[int]) -> Any:
        return await client.completions.create(
            model=family,
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )

    async def ask_all() -> list[Any]:
        url = f"{service.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    reference = Reference(folders[family])
    for prompt, answer in zip(prompts, asyncio.run(ask_all()), strict=True):
        (choice,) = answer.choices
        ids = choice.model_extra["token_ids"]
        assert len(ids) == answer.usage.completion_tokens == 24
        assert choice.text == tokenizer.decode(ids)
        reference.check_greedy(prompt, ids, f"{family}, length {len(prompt)}")
    assert reference.tally.ties == 0
