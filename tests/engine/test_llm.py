"""Offline generation with a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.factory import make_tiny_model
from tridentlm import LLM, SamplingParams
from tridentlm.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = ["The quick brown fox", "Pages hold tokens", "ภาษาไทย 한국어 🙂", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", max_running=3, num_pages=64, threads=1) as llm:
        yield llm


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert together == alone
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == 24
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        assert answer.prompt_tokens == len(llm.tokenizer.encode(prompt))


def test_two_steps_in_flight_and_small_chunks_change_nothing(llm: LLM, folder: Path) -> None:
    settings: dict[str, Any] = {"max_running": 3, "num_pages": 64, "threads": 1}
    with LLM(str(folder), device="cpu", steps_in_flight=2, max_step_tokens=8, **settings) as other:
        assert other.generate(PROMPTS, GREEDY) == llm.generate(PROMPTS, GREEDY)


def test_token_ids_are_a_prompt_and_params_may_differ(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    short = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    first, second = llm.generate([ids, PROMPTS[0]], [GREEDY, short])
    assert second.token_ids == first.token_ids[:2]


def test_text_ends_before_a_stop_string_and_the_engine_goes_on_for_others(llm: LLM) -> None:
    whole, other = llm.generate(PROMPTS[:2], GREEDY)
    stop = whole.text[4:6]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=(stop,))
    cut, same = llm.generate(PROMPTS[:2], [params, GREEDY])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert same == other


def test_stop_token_ends_the_answer_and_is_no_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    params = SamplingParams(max_tokens=24, temperature=0, stop_token_ids=(whole[3],))
    answer = llm.generate(PROMPTS[0], params)[0]
    end = whole.index(whole[3])
    assert answer.token_ids == whole[: end + 1]
    assert answer.text == llm.tokenizer.decode(whole[:end])
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompts", "params", "error"),
    [
        ([""], None, InvalidRequest),
        ([[]], None, InvalidRequest),
        ([[1, 2**40]], None, InvalidRequest),
        ([[1.5]], None, InvalidRequest),
        ([1, 2], None, InvalidRequest),
        (["a", [5] * 5000], None, ContextLengthExceeded),
        (["a"], [GREEDY, GREEDY], InvalidRequest),
        (["a"], [SamplingParams(priority=1)], InvalidRequest),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, error: type[Exception]
) -> None:
    before = llm._engine.stats()
    with pytest.raises(error):
        llm.generate(prompts, params)
    assert llm._engine.stats() == before
    assert llm.generate([], GREEDY) == []


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="missing"):
        LLM(str(tmp_path / "missing"))
