"""The sampling parameters that a caller may set, and what each may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tridentlm.errors import InvalidRequest

TOP_LIMIT = 2**31 - 1
MAX_LOGPROBS = 20
MAX_BIASES = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens of one request are chosen, and what is told of them.

    The answer is one that `grammar` describes, if there is one: see `tridentlm.grammar`.

    `max_tokens` None: the rest of the context, capped by what the KV pool can hold. `temperature` 0
    is greedy. `top_k` 0 and -1, `top_p` 1 and `min_p` 0 are off. `seed` None: a random one. `stop`
    holds up to 16 texts that end the request; `stop_token_ids` end it like an EOS. `timeout` is in
    seconds from arrival (None: no limit). A lower `priority` goes first, where the policy looks at
    it. Prompts share cached KV only with requests of the same `cache_salt`. Requests of one `user`
    count as one client where clients take turns, through whatever session they come.

    Before `min_tokens` tokens no stop token is sampled and no stop text is looked for. With
    `include_stop_str_in_output` the stop text or token is part of the text. `presence_penalty` and
    `frequency_penalty` are taken off the logits of generated tokens, once and for each time;
    `repetition_penalty` divides positive and multiplies negative logits of generated tokens and of
    those in the prompt. `logit_bias`, (id, value) pairs, is added to logits. `logprobs` n tells of
    each token its log-probability and that of the n likeliest, `prompt_logprobs` likewise of the
    prompt; None: of none. With `echo` the text, and what is told of its tokens, begins with the
    prompt's. `max_tokens` 0 is for requests that only ask for their prompt's.
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
    user: str = ""
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Mapping[str, Any] | None = None
    echo: bool = False

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
        params = cls(**{name: _CHECKS[name](name, value) for name, value in given.items()})
        if params.max_tokens == 0 and not params.echo and params.prompt_logprobs is None:
            raise InvalidRequest("max_tokens must be at least 1, got 0.", param="max_tokens")
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens, which is {params.max_tokens}; "
                f"got {params.min_tokens}.",
                param="min_tokens",
            )
        return params


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


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be an object.", param=name)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r}.", param=name)
    return value


def _name(name: str, value: Any) -> str:
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


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A JSON object's keys are strings, whatever they mean."""
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise InvalidRequest(
            f"{name} must be an object of at most {MAX_BIASES} token ids with their bias.",
            param=name,
        )
    pairs = []
    for key, bias in value.items():
        is_id = isinstance(key, int) or (isinstance(key, str) and key.isascii() and key.isdigit())
        if not is_id or isinstance(key, bool) or not 0 <= int(key) <= TOP_LIMIT:
            raise InvalidRequest(f"{name} has the key {key!r}, not a token id.", param=name)
        pairs.append((int(key), _number(-100, 100)(name, bias)))
    return tuple(pairs)


_CHECKS: dict[str, Any] = {
    "max_tokens": _integer(0),
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
    "cache_salt": _name,
    "user": _name,
    "min_tokens": _integer(0),
    "include_stop_str_in_output": _flag,
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 100, open_low=True),
    "logit_bias": _bias,
    "logprobs": _integer(0, MAX_LOGPROBS),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "grammar": _object,
    "echo": _flag,
}
