"""The official `openai` client on a real model: its greedy text is transformers' greedy text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.modelcase import ModelCase, serving

pytestmark = pytest.mark.server
PAGE = 16
BUDGET = 64  # tokens a step: prompts longer than that are computed in chunks


class Case(ModelCase):
    """A service, the tokenizer of its model, and the same weights in transformers."""

    def asynchronous(self) -> openai.AsyncOpenAI:
        url = f"{self.service.url}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def models() -> list[str]:
    return ["smollm2", "llama", "qwen3"]


@pytest.fixture(scope="module", params=models())
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    with serving(request.param, folder, BUDGET) as (service, files):
        made = Case(service, files)
        with made.client:
            yield made
    tally = made.reference.tally
    print(f"\n{request.param}: {tally.tokens} tokens compared, {tally.ties} excused as ties")
    assert tally.tokens > 0


def ids_of(choice: Any) -> list[int]:
    return list(choice.model_extra["token_ids"])


def complete(case: Case, prompt: list[int], max_tokens: int) -> Any:
    return case.client.completions.create(
        model=case.name,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_token_ids": True},
    )


def words(case: Case, count: int) -> list[int]:
    """A prompt of exactly `count` tokens of ordinary text."""
    text = "Once upon a time there was a small house by the river, and in it lived a fox. "
    ids = case.tokenizer.encode(text * (count // 10 + 1))
    return ids[:count]


def test_prompts_of_every_length_around_a_page_are_greedy_alone(case: Case) -> None:
    for length in (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1):
        prompt = words(case, length)
        answer = complete(case, prompt, 6)
        case.reference.check_greedy(prompt, ids_of(answer.choices[0]), f"length {length}")
        assert answer.usage.prompt_tokens == length


def test_prompts_longer_than_the_step_budget_are_greedy(case: Case) -> None:
    for length in (BUDGET - 1, BUDGET, BUDGET + 1, 3 * BUDGET + 5):
        prompt = words(case, length)
        answer = complete(case, prompt, 6)
        case.reference.check_greedy(prompt, ids_of(answer.choices[0]), f"length {length}")


def test_sixteen_at_once_are_greedy_each_streamed_and_not(case: Case) -> None:
    lengths = [1, 5, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100, 128, 150, 200]

    async def one(
        client: openai.AsyncOpenAI, length: int, stream: bool
    ) -> tuple[list[int], list[int], str]:
        prompt = words(case, length)
        answer = await client.completions.create(
            model=case.name,
            prompt=prompt,
            max_tokens=12,
            temperature=0,
            stream=stream,
            extra_body={"return_token_ids": True},
        )
        if not stream:
            return prompt, ids_of(answer.choices[0]), answer.choices[0].text
        ids: list[int] = []
        text = ""
        async for chunk in answer:
            for choice in chunk.choices:
                text += choice.text
                ids += (choice.model_extra or {}).get("token_ids") or []
        return prompt, ids, text

    async def all_at_once() -> list[tuple[list[int], list[int], str]]:
        async with case.asynchronous() as client:
            return await asyncio.gather(
                *(one(client, n, i % 2 == 0) for i, n in enumerate(lengths))
            )

    for prompt, ids, text in asyncio.run(all_at_once()):
        case.reference.check_greedy(prompt, ids, f"length {len(prompt)} of sixteen")
        assert text == case.tokenizer.decode(ids)


def test_chat_is_greedy_over_the_models_own_template_streamed_and_not(case: Case) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    fields: dict[str, Any] = {
        "model": case.name,
        "messages": messages,
        "max_tokens": 16,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
    }
    whole = case.client.chat.completions.create(**fields)
    ids = ids_of(whole.choices[0])
    prompt = case.tokenizer.encode_chat(messages)
    case.reference.check_greedy(prompt, ids, "chat")
    assert whole.usage.prompt_tokens == len(prompt)
    assert whole.usage.completion_tokens == len(ids)
    ended = ids[-1] in case.tokenizer.eos_token_ids
    assert whole.choices[0].finish_reason == ("stop" if ended else "length")
    streamed = case.client.chat.completions.create(**fields, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
    assert text == whole.choices[0].message.content


def test_a_seeded_request_is_the_same_alone_and_in_a_crowd(case: Case) -> None:

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        answer = await client.completions.create(
            model=case.name, prompt="The fox", max_tokens=10, temperature=0.9, top_p=0.9, seed=seed
        )
        return answer.choices[0].text

    async def run() -> tuple[list[str], list[str]]:
        async with case.asynchronous() as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(6)))
            return together, [await one(client, seed) for seed in range(6)]

    together, alone = asyncio.run(run())
    assert together == alone
    assert len(set(alone)) > 1
