"""What a request asks for, and what may be asked: `SamplingParams`, `Request`, `Limits`."""

from __future__ import annotations

import enum
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tridentlm.errors import ContextLengthExceeded, InvalidRequest, Overloaded

TOP_LIMIT = 2**31 - 1


class FinishReason(enum.IntEnum):
    """Why a request ended. NONE: it has not. The numbers are the wire's, from engine to stub."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    @property
    def text(self) -> str:
        """OpenAI's spelling; empty while the request runs."""
        return "" if self is FinishReason.NONE else self.name.lower()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens of one request are chosen.

    `max_tokens` None: the rest of the context, capped by what the KV pool can hold. `temperature` 0
    is greedy. `top_k` 0 and -1, `top_p` 1 and `min_p` 0 are off. `seed` None: a random one. `stop`
    holds up to 16 texts that end the request; `stop_token_ids` end it like an EOS. `timeout` is in
    seconds from arrival (None: no limit). A lower `priority` goes first, where the policy looks at
    it. Prompts share cached KV only with requests of the same `cache_salt`.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    timeout: float | None = None
    priority: int = 0
    cache_salt: str = ""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Checks and converts the fields of a JSON object. Unset and null fields keep defaults.

        Raises InvalidRequest with `param` for a wrong type or range, and for a field that does not
        exist: a caller that tolerates unknown fields takes them out first.
        """
        unknown = sorted(set(values) - set(cls.__slots__))
        if unknown:
            raise InvalidRequest(f"Unknown sampling parameter: {unknown[0]}.", param=unknown[0])
        given = {name: value for name, value in values.items() if value is not None}
        return cls(**{name: _CHECKS[name](name, value) for name, value in given.items()})


def _integer(low: int, high: int = TOP_LIMIT) -> Any:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise InvalidRequest(f"{name} must be an integer, got {value!r}.", param=name)
        if not low <= value <= high:
            bound = f"at least {low}" if value < low else f"at most {high}"
            raise InvalidRequest(f"{name} must be {bound}, got {int(value)}.", param=name)
        return int(value)

    return check


def _number(low: float, high: float, *, open_low: bool = False) -> Any:
    span = f"{'(' if open_low else '['}{low:g}, {high:g}]"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequest(f"{name} must be a number, got {value!r}.", param=name)
        if not low <= value <= high or (open_low and value == low) or not math.isfinite(value):
            raise InvalidRequest(f"{name} must be in {span}, got {value:g}.", param=name)
        return float(value)

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r}.", param=name)
    return value


def _salt(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 256:
        raise InvalidRequest(f"{name} must be a string of at most 256 characters.", param=name)
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
        raise InvalidRequest("stop must be a string or a list of strings.", param=name)
    if not all(stops):
        raise InvalidRequest("stop must not contain an empty string.", param=name)
    if len(stops) > 16:
        raise InvalidRequest(f"stop takes at most 16 strings, got {len(stops)}.", param=name)
    if any(len(stop) > 1000 for stop in stops):
        raise InvalidRequest("stop strings have at most 1000 characters each.", param=name)
    return tuple(stops)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > 64:
        raise InvalidRequest(f"{name} must be a list of at most 64 token ids.", param=name)
    return tuple(_integer(0)(name, v) for v in value)


_CHECKS: dict[str, Any] = {
    "max_tokens": _integer(1),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1, open_low=True),
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "seed": _integer(-(2**63), 2**64 - 1),
    "ignore_eos": _flag,
    "stop": _stops,
    "stop_token_ids": _token_ids,
    "skip_special_tokens": _flag,
    "timeout": _number(0, 1e9, open_low=True),
    "priority": _integer(-TOP_LIMIT),
    "cache_salt": _salt,
}


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted request as the scheduler knows it.

    `id` is unique for the life of the engine process. `prompt` is int32[n], n >= 1. `max_tokens` is
    resolved by `Limits.resolve`. `seed` is in [0, 2**64). `stop_token_ids` is the full set that
    ends the request: EOS ids (unless ignored) and the request's own. `deadline` is a
    time.monotonic() value in seconds, or inf. `client` is who shares the slots fairly with others.
    """

    id: int
    prompt: npt.NDArray[np.int32]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    deadline: float = math.inf
    priority: int = 0
    cache_salt: str = ""
    client: str = ""

    @classmethod
    def build(
        cls,
        id: int,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        limits: Limits,
        eos_token_ids: frozenset[int],
        client: str = "",
    ) -> Request:
        """The request that `params` describe, arriving now.

        Raises InvalidRequest (or ContextLengthExceeded) if it can never be served.
        """
        limits.check_ids(prompt)
        stops = frozenset(params.stop_token_ids)
        return cls(
            id=id,
            prompt=prompt,
            max_tokens=limits.resolve(len(prompt), params.max_tokens),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            stop_token_ids=stops if params.ignore_eos else stops | eos_token_ids,
            deadline=math.inf if params.timeout is None else time.monotonic() + params.timeout,
            priority=params.priority,
            cache_salt=params.cache_salt,
            client=client,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold. Entry (the stub) and admission (the scheduler) ask the same object.

    `max_model_len`: tokens of prompt and output together. `num_pages` pages of `page_size` tokens
    are the whole KV pool. `max_running` requests hold slots at once, `max_queue` more may wait.
    `max_step_tokens` is the budget of tokens computed in one step. `vocab_size` bounds token ids.
    """

    max_model_len: int
    num_pages: int
    page_size: int
    max_running: int
    max_queue: int
    max_step_tokens: int
    vocab_size: int

    @property
    def max_tokens_held(self) -> int:
        """Tokens that one request can ever hold."""
        return min(self.max_model_len, self.num_pages * self.page_size)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def resolve(self, prompt_len: int, max_tokens: int | None) -> int:
        """The request's `max_tokens`, if it can ever be served.

        Raises ContextLengthExceeded beyond the model's context, InvalidRequest for an empty prompt
        or for more tokens than the whole KV pool holds.
        """
        if prompt_len < 1:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if prompt_len >= self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens, and your "
                f"prompt has {prompt_len}: no room is left for output.",
                param="prompt",
            )
        total = prompt_len + (max_tokens or 1)
        if total > self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens, and you "
                f"asked for {total} ({prompt_len} in the prompt, {max_tokens} for the output).",
                param="max_tokens",
            )
        if total > self.max_tokens_held:
            raise InvalidRequest(
                f"The KV cache holds {self.max_tokens_held} tokens, and this request needs {total} "
                f"({prompt_len} in the prompt, {max_tokens or 1} for the output).",
                param="max_tokens" if max_tokens else "prompt",
                code="kv_cache_exceeded",
            )
        return max_tokens or self.max_tokens_held - prompt_len

    def check_queue(self, unfinished: int) -> None:
        """Raises Overloaded when `unfinished` requests already fill every slot and the queue."""
        if unfinished >= self.max_running + self.max_queue:
            raise Overloaded(
                f"The queue is full: {self.max_running} requests may run and {self.max_queue} wait."
            )

    def check_ids(self, ids: npt.NDArray[np.int32]) -> None:
        """Raises InvalidRequest for a token id outside the vocabulary."""
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            raise InvalidRequest(f"Token ids must be in [0, {self.vocab_size}).", param="prompt")
