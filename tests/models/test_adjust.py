"""Penalties, bias and bans against numpy: exact logits, and what is drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.core.driver import make_limits
from tests.models.test_sampling import LOGITS, chi_square, filtered, plan
from tridentlm import adjust
from tridentlm.adjust import LogitAdjuster
from tridentlm.core.extras import Newcomer, Penalties, StepExtras
from tridentlm.core.plan import StepPlan
from tridentlm.sampling import sample

CPU = torch.device("cpu")
NONE = np.zeros(0, np.int32)
VOCAB = len(LOGITS)
LIMITS = make_limits(max_running=41, max_model_len=128, vocab_size=VOCAB)


@dataclass(frozen=True)
class Asked:
    """One row: its penalties, its bias, and its tokens so far."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    @property
    def is_penalized(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0.0, 0.0, 1.0)


def expected(logits: Sequence[float], asked: Asked) -> npt.NDArray[np.float64]:
    """The definitions, token by token."""
    changed = np.array(logits, np.float64)
    for token, value in asked.bias.items():
        changed[token] += value
    for token in range(len(changed)):
        count = list(asked.output).count(token)
        if count or token in asked.prompt:
            divided = changed[token] > 0
            changed[token] *= 1 / asked.repetition if divided else asked.repetition
        changed[token] -= asked.frequency * count + asked.presence * (count > 0)
    return changed


def int32(values: Any) -> npt.NDArray[np.int32]:
    return np.array(list(values), np.int32)


def real32(values: Any) -> npt.NDArray[np.float32]:
    return np.array(list(values), np.float32)


def extras(rows: Sequence[Asked], slots: Sequence[int], *, new: bool = True) -> StepExtras:
    """What a scheduler would plan for these rows in these slots."""
    penalized = [i for i, row in enumerate(rows) if row.is_penalized]
    pairs = [(i, *pair) for i, row in enumerate(rows) for pair in row.bias.items()]
    newcomers = [
        Newcomer(slots[i], int32(rows[i].prompt), int32(rows[i].output)) for i in penalized if new
    ]
    penalties = Penalties(
        rows=int32(penalized),
        slots=int32(slots[i] for i in penalized),
        presence=real32(rows[i].presence for i in penalized),
        frequency=real32(rows[i].frequency for i in penalized),
        repetition=real32(rows[i].repetition for i in penalized),
        newcomers=tuple(newcomers),
    )
    return StepExtras(
        request_ids=np.arange(len(rows)),
        bias_rows=int32(row for row, _, _ in pairs),
        bias_tokens=int32(token for _, token, _ in pairs),
        bias=real32(value for _, _, value in pairs),
        penalties=penalties if penalized else None,
    )


def step(rows: Sequence[Asked], slots: Sequence[int], *, new: bool = True) -> StepPlan:
    lengths = [len(row.prompt) + len(row.output) for row in rows]
    return replace(plan(len(rows), lengths), extras=extras(rows, slots, new=new))


CASES = [
    Asked(),
    Asked(presence=1.5, output=(1, 1, 4)),
    Asked(frequency=0.7, output=(1, 1, 4), prompt=(0, 3)),
    Asked(presence=-1.0, frequency=-0.5, output=(2, 2, 2, 9)),
    Asked(repetition=1.8, prompt=(1, 5, 7), output=(3, 8)),
    Asked(repetition=0.5, prompt=(1, 5, 7), output=(3, 3)),
    Asked(presence=0.3, frequency=0.2, repetition=1.2, prompt=(1, 1), output=(1, 6)),
    Asked(bias={1: -100.0, 7: 41.0, 8: 2.5}),
    Asked(bias={1: -3.0, 3: 1.0}, repetition=1.5, presence=1.0, prompt=(3,), output=(1,)),
]


def test_logits_are_changed_as_defined_whatever_the_neighbours_ask() -> None:
    logits = torch.tensor([LOGITS] * len(CASES))
    before = logits.clone()
    slots = [9, 0, 3, 1, 2, 8, 5, 4, 7]
    changed = LogitAdjuster(CPU, LIMITS).adjust(logits, step(CASES, slots))
    assert torch.equal(logits, before), "the model's logits stay for log-probabilities"
    for row, case in zip(changed.numpy(), CASES, strict=True):
        np.testing.assert_allclose(row, expected(LOGITS, case), rtol=1e-6, atol=1e-5)


def test_counts_follow_the_sampled_tokens_without_the_host() -> None:
    adjuster, slots = LogitAdjuster(CPU, LIMITS), [2, 0]
    rows = [
        Asked(frequency=1.0, prompt=(0, 1), output=(4,)),
        Asked(presence=0.5, repetition=2.0, prompt=(6,)),
    ]
    logits = torch.tensor([LOGITS, LOGITS])
    for turn, drawn in enumerate([(3, 3), (3, 1), (4, 3), (0, 9)]):
        asked = step(rows, slots, new=turn == 0)
        changed = adjuster.adjust(logits, asked).numpy()
        for row, case in zip(changed, rows, strict=True):
            np.testing.assert_allclose(row, expected(LOGITS, case), rtol=1e-6, atol=1e-5)
        adjuster.count(torch.tensor(drawn, dtype=torch.int32), asked)
        rows = [
            replace(row, output=(*row.output, token))
            for row, token in zip(rows, drawn, strict=True)
        ]


def test_a_slots_next_request_does_not_inherit_counts() -> None:
    adjuster = LogitAdjuster(CPU, LIMITS)
    logits = torch.tensor([LOGITS])
    first = step([Asked(presence=2.0, repetition=3.0, prompt=(5, 6), output=(1, 2))], [3])
    adjuster.adjust(logits, first)
    adjuster.count(torch.tensor([8]), first)
    case = Asked(presence=2.0, repetition=3.0, prompt=(4,))
    longer = Asked(presence=1.0, prompt=[0] * 99)
    adjuster.adjust(logits, step([longer], [40]))
    changed = adjuster.adjust(logits, step([case], [3])).numpy()[0]
    np.testing.assert_allclose(changed, expected(LOGITS, case), rtol=1e-6)


@pytest.mark.parametrize("at_once", [1, 8, 20])
def test_rows_are_changed_alike_however_many_are_looked_at_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adjust, "PLACES", at_once)
    logits = torch.tensor([LOGITS] * len(CASES))
    changed = LogitAdjuster(CPU, LIMITS).adjust(logits, step(CASES, range(len(CASES))))
    for row, case in zip(changed.numpy(), CASES, strict=True):
        np.testing.assert_allclose(row, expected(LOGITS, case), rtol=1e-6, atol=1e-5)


def test_a_ban_holds_against_any_bias() -> None:
    asked = step([Asked(bias={1: 100.0})], [0])
    assert asked.extras is not None
    banned = replace(
        asked.extras,
        bias_rows=int32([0, 0]),
        bias_tokens=int32([1, 1]),
        bias=real32([100.0, -np.inf]),
    )
    changed = LogitAdjuster(CPU, LIMITS).adjust(
        torch.tensor([LOGITS]), replace(asked, extras=banned)
    )
    assert changed[0, 1] == -torch.inf
    assert torch.isfinite(changed[0, 2:]).all()


@pytest.mark.parametrize("case", CASES[1:])
@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"), [(1.0, 0.0, 0, 1.0), (0.8, 0.05, 6, 0.9)]
)
def test_tokens_are_drawn_from_the_changed_logits(
    case: Asked, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    count = 20_000
    given = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    changed = LogitAdjuster(CPU, LIMITS).adjust(torch.tensor([LOGITS]), step([case], [0]))
    asked = plan(count, np.arange(count) % 5, seeds=np.arange(count), **given)
    tokens = sample(changed.expand(count, -1), asked)
    observed = np.bincount(tokens.numpy(), minlength=VOCAB)
    logits = expected(LOGITS, case).tolist()
    wanted = filtered(temperature, min_p, top_k, top_p, logits) * count
    likely = wanted > 1
    assert observed[~likely].sum() <= 3
    # At most 9 degrees of freedom: exceeded by chance once in 20,000.
    assert chi_square(observed[likely], wanted[likely]) < 36
