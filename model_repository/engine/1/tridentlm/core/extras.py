"""What few requests ask beyond plain sampling, and how it travels: None wherever nobody asks.

SamplingParams --RequestExtras--> channel --> slot table --StepExtras--> runner
                                                                           |
TextStream <--- channel <--- StepOutput <---------------------Logprobs-----'
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tridentlm.core.params import SamplingParams

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


def _no_rows() -> I32:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """The fields of these names in `SamplingParams`; `grammar` as JSON text, "" for none."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""

    @classmethod
    def of(cls, params: SamplingParams, max_tokens: int) -> RequestExtras | None:
        """None when the request asks for nothing of this."""
        extras = cls(
            **{name: getattr(params, name) for name in cls.__slots__ if name != "prompt_logprobs"},
            prompt_logprobs=_prompt_logprobs(params),
        )
        extras = replace(extras, grammar="" if params.grammar is None else _text(params.grammar))
        if extras.grammar and params.ignore_eos:
            # EOS alone ends a grammar, so this means: as late as the grammar may end.
            extras = replace(extras, min_tokens=max_tokens)
        return None if extras == _NOTHING else extras

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> RequestExtras:
        pairs = tuple((int(token), float(bias)) for token, bias in fields["logit_bias"])
        return cls(**{**fields, "logit_bias": pairs})

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


_NOTHING = RequestExtras()


def _text(grammar: Mapping[str, Any]) -> str:
    return json.dumps(grammar, ensure_ascii=False, separators=(",", ":"))


def _prompt_logprobs(params: SamplingParams) -> int | None:
    """An echo tells of the prompt's tokens what it tells of the others."""
    asked = [params.prompt_logprobs, params.logprobs if params.echo else None]
    return max((top for top in asked if top is not None), default=None)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A slot whose request samples for the first time since it got the slot: its tokens so far."""

    slot: int
    prompt: I32
    output: I32


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with penalties: `rows` [P] of those that sample, and their slots.

    The runner counts, slot by slot, the tokens of `newcomers` and then those that it samples.
    """

    rows: I32
    slots: I32
    presence: F32
    frequency: F32
    repetition: F32
    newcomers: tuple[Newcomer, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Places whose log-probabilities are asked for: Q in prompts, then L that are sampled.

    The token after the plan's token `places[i]` is `targets[i]`, for Q; `rows` [L] are of those
    that sample. `ids` and `positions` [Q + L] say whose token it is, and which. `top`: how many of
    the likeliest tokens are told, the most that any of them asks for.
    """

    places: I32
    targets: I32
    rows: I32
    ids: I64
    positions: I64
    top: int


@dataclass(frozen=True, slots=True)
class StepExtras:
    """What some of the S rows that sample ask. Rows are indexes into `StepPlan.sampled`.

    `bias` [n] is added to the logits of tokens `bias_tokens` of `bias_rows`; -inf bans a token.
    """

    request_ids: I64  # [S]
    bias_rows: I32  # [n]
    bias_tokens: I32  # [n]
    bias: F32  # [n]
    penalties: Penalties | None = None
    measured: Measured | None = None
    constrained: I32 = field(default_factory=_no_rows)  # [G] rows that a grammar constrains
    allowed: U32 | None = None  # [G, vocab / 32] bits, the lowest first; 1: it may be drawn


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities under the model's own distribution, before bias and temperature.

    Of n tokens: `ids` [n] says whose, `positions` [n] counts from the prompt's first. Column 0 of
    `tokens` and `values` is the token itself, the others are the likeliest in falling order.
    `ranks` [n]: 1 for the likeliest.
    """

    ids: I64
    positions: I64
    tokens: I32  # [n, 1 + top]
    values: F32  # [n, 1 + top]
    ranks: I32

    def of(self, keep: npt.NDArray[np.bool_]) -> Logprobs:
        """Those of the rows in `keep` [n]."""
        names = ("ids", "positions", "tokens", "values", "ranks")
        return Logprobs(*(getattr(self, name)[keep] for name in names))
