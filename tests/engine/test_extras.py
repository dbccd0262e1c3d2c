"""Log-probabilities, penalties and min_tokens of a real model, against transformers and numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from tests.core.driver import Reckless
from tests.factory import make_tiny_model
from tridentlm import LLM, SamplingParams
from tridentlm.llm import Completion
from tridentlm.protocol import TokenLogprob

TOLERANCE = 1e-3
IDS = [list(range(3 + i, 40 + 5 * i, 2)) for i in range(5)]


class Model:
    """A tiny model, and what transformers makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_tiny_model("llama", folder)
        self.reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32
        ).eval()

    def llm(self, **settings: Any) -> LLM:
        given = {"max_running": 4, "num_pages": 64, "page_size": 4, "threads": 1, **settings}
        return LLM(str(self.folder), device="cpu", **given)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        logits = self.reference(torch.tensor([ids])).logits[0]
        return np.asarray(logits.double().numpy())

    def logprobs(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Row i: of what follows token i."""
        return np.asarray(torch.from_numpy(self.logits(ids)).log_softmax(-1).numpy())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("extras") / "tiny")


def check(entry: TokenLogprob, token: int, row: npt.NDArray[np.float64], top: int) -> None:
    chosen = entry.chosen
    assert chosen.token_id == token
    assert chosen.logprob == pytest.approx(row[token], abs=TOLERANCE)
    assert chosen.rank is not None
    ahead, level = (row > row[token] + 1e-5).sum(), (row > row[token] - 1e-5).sum()
    assert ahead + 1 <= chosen.rank <= max(level, 1)
    values = [other.logprob for other in entry.top]
    np.testing.assert_allclose(values, np.sort(row)[::-1][:top], atol=TOLERANCE)
    for rank, other in enumerate(entry.top, 1):
        assert other.rank == rank
        assert other.logprob == pytest.approx(row[other.token_id], abs=TOLERANCE)


def check_all(model: Model, prompt: list[int], answer: Completion, top: int) -> None:
    rows = model.logprobs(prompt + answer.token_ids)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for i, (entry, token) in enumerate(zip(answer.logprobs, answer.token_ids, strict=True)):
        check(entry, token, rows[len(prompt) - 1 + i], top)
        assert entry.offset is not None
        if entry.chosen.raw is None and (not i or answer.logprobs[i - 1].chosen.raw is None):
            assert answer.text[entry.offset :].startswith(entry.chosen.token)


@pytest.mark.parametrize("settings", [{}, {"steps_in_flight": 2, "max_step_tokens": 8}])
def test_they_are_the_models_own_whatever_the_sampler_makes_of_them(
    model: Model, settings: dict[str, Any]
) -> None:
    plain = {"max_tokens": 12, "ignore_eos": True}
    asked = [
        SamplingParams(**plain, logprobs=3, temperature=0),
        SamplingParams(**plain, logprobs=20, temperature=1.4, top_k=5, seed=1),
        SamplingParams(**plain, logprobs=0, presence_penalty=2.0, repetition_penalty=1.5, seed=2),
        SamplingParams(**plain, seed=3),
        SamplingParams(**plain, logprobs=1, logit_bias=((7, 9.0),), seed=4),
    ]
    with model.llm(**settings) as llm:
        answers = llm.generate(IDS, asked)
    for prompt, params, answer in zip(IDS, asked, answers, strict=True):
        if params.logprobs is None:
            assert answer.logprobs is None
        else:
            check_all(model, prompt, answer, params.logprobs)


@pytest.mark.parametrize("budget", [0, 8])
def test_a_prompts_are_told_of_every_token_also_when_it_is_cached(
    model: Model, budget: int
) -> None:
    prompt, params = IDS[4], SamplingParams(max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    rows = model.logprobs(prompt)
    with model.llm(max_step_tokens=budget) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=1))
        [answer] = llm.generate([prompt], params)
        [scored] = llm.generate([prompt], SamplingParams(max_tokens=0, echo=True, logprobs=2))
    assert (scored.token_ids, scored.finish_reason) == ([], "length")
    assert scored.text == llm.tokenizer.decode(prompt)
    for entries in (answer.prompt_logprobs, scored.logprobs):
        assert entries is not None
        assert len(entries) == len(prompt)
        assert (entries[0].chosen.logprob, entries[0].top) == (None, [])
        for i, entry in enumerate(entries[1:], 1):
            check(entry, prompt[i], rows[i - 1], 2)


def greedy(model: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    """One token after the other, by the definitions of the penalties."""
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        logits = model.logits(prompt + output)[-1]
        for token, bias in params.logit_bias:
            logits[token] += bias
        seen = sorted({*prompt, *output})
        part = logits[seen]
        rate = params.repetition_penalty
        logits[seen] = np.where(part > 0, part / rate, part * rate)
        counts = np.bincount(output, minlength=len(logits))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if len(output) < params.min_tokens:
            logits[list(params.stop_token_ids)] = -np.inf
        output.append(int(logits.argmax()))
        if output[-1] in params.stop_token_ids:
            break
    return output


def admit_all(llm: LLM) -> None:
    """Whoever fits for the moment is admitted, so that pages run out."""
    llm._engine.scheduler._admission.expected = Reckless()


PENALIZED = [
    SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, presence_penalty=1.2),
    SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, frequency_penalty=0.6),
    SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, repetition_penalty=1.7),
    SamplingParams(
        max_tokens=30,
        temperature=0,
        ignore_eos=True,
        presence_penalty=-0.2,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias=((11, 1.5), (20, -100.0)),
    ),
    SamplingParams(max_tokens=30, temperature=0, ignore_eos=True),
]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps_in_flight": 2, "max_step_tokens": 16},
        {"steps_in_flight": 2, "num_pages": 20},
        {"steps_in_flight": 1, "num_pages": 20, "prefix_cache": "null"},
    ],
)
def test_penalties_are_exact_with_steps_in_flight_and_through_preemptions(
    model: Model, settings: dict[str, Any]
) -> None:
    with model.llm(**settings) as llm:
        admit_all(llm)
        answers = llm.generate(IDS, PENALIZED)
        preemptions = llm._engine.stats().preemptions
    assert (preemptions > 0) == ("num_pages" in settings)
    for prompt, params, answer in zip(IDS, PENALIZED, answers, strict=True):
        assert answer.token_ids == greedy(model, prompt, params)


def test_seeded_answers_with_penalties_survive_preemptions(model: Model) -> None:
    params = [
        SamplingParams(max_tokens=30, seed=i, ignore_eos=True, frequency_penalty=1.0, logprobs=0)
        for i in range(5)
    ]
    with model.llm() as llm:
        ample = llm.generate(IDS, params)
    with model.llm(num_pages=20, steps_in_flight=2) as llm:
        admit_all(llm)
        tight = llm.generate(IDS, params)
        assert llm._engine.stats().preemptions > 0
    for before, after in zip(ample, tight, strict=True):
        assert before.token_ids == after.token_ids
        assert before.logprobs is not None
        assert after.logprobs is not None
        for one, other in zip(before.logprobs, after.logprobs, strict=True):
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=TOLERANCE)


def test_nothing_ends_an_answer_before_min_tokens(model: Model) -> None:
    prompt = IDS[0]
    free = greedy(model, prompt, SamplingParams(max_tokens=3))
    for least in (0, 1, 2, 5):
        params = SamplingParams(
            max_tokens=9,
            temperature=0,
            ignore_eos=True,
            stop_token_ids=(free[0], free[1]),
            min_tokens=least,
        )
        with model.llm(steps_in_flight=2) as llm:
            [answer] = llm.generate([prompt], params)
        expected = greedy(model, prompt, params)
        assert answer.token_ids == expected
        assert len(expected) >= max(least, 1)
