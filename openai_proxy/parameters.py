"""Which fields a request body may carry, and what becomes of each.

body --+-- served           -> submissions (sampling, prompt, streaming)
       +-- a label          -> accepted, no effect by definition (metadata...)
       +-- not built yet    -> 400 naming it, unless its value means "off"
       +-- unknown          -> ignored: logged once, named in a response header
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from openai_proxy import structured
from tridentlm.core.request import SamplingParams
from tridentlm.errors import InvalidRequest

log = logging.getLogger("openai_proxy")

LABELS = frozenset({"metadata", "safety_identifier", "prompt_cache_key"})
_MAX_LOGGED = 1000
_MAX_NAMED = 20
_MAX_NAME = 64


def only(*values: Any) -> Callable[[Any], bool]:
    """Off is any of `values`, of the same type: JSON's false is not 0."""
    return lambda value: any(
        value == off and isinstance(value, bool) == isinstance(off, bool) for off in values
    )


_never = only()
_empty = only([], {}, "")
_false = only(False)
_zero = only(0)

# Parameters of OpenAI, vLLM and SGLang that are not built: the values that ask for nothing. null
# asks for nothing everywhere.
OFF: dict[str, Callable[[Any], bool]] = {
    "n": only(1),
    "best_of": only(1),
    "logprobs": _false,
    "top_logprobs": _zero,
    "prompt_logprobs": _never,
    "max_new_tokens": _never,
    "sampling_params": _empty,
    "parameters": _empty,
    "length_penalty": only(1),
    "tools": _empty,
    "tool_choice": only("none", "auto"),
    "parallel_tool_calls": only(True, False),
    "functions": _empty,
    "function_call": only("none", "auto"),
    "structural_tag": _never,
    "grammar": _never,
    "json_schema": _never,
    "regex": _never,
    "ebnf": _never,
    "echo": _false,
    "suffix": only(""),
    "modalities": only(["text"]),
    "audio": _never,
    "prediction": _never,
    "web_search_options": _never,
    "reasoning_effort": _never,
    "verbosity": only("medium"),
    "store": _false,
    "service_tier": only("auto", "default"),
    "use_beam_search": _false,
    "no_stop_trim": _false,
    "stop_regex": _empty,
    "bad_words": _empty,
    "allowed_token_ids": _never,
    "truncate_prompt_tokens": _never,
    "spaces_between_special_tokens": only(True),
    "documents": _empty,
    "prompt_embeds": _never,
    "lora_path": _never,
}

SAMPLING = frozenset(spec.name for spec in fields(SamplingParams)) - OFF.keys()
SERVED = (
    SAMPLING | structured.FIELDS | {"model", "n", "stream", "stream_options", "return_token_ids"}
)


class IgnoredParameters:
    """Remembers which unknown fields were logged, so that each is logged once per process."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name)
                log.warning("ignoring the unknown request parameter %r", name[:_MAX_NAME])

    def headers(self, names: Sequence[str]) -> list[tuple[bytes, bytes]]:
        """The response header that names them, if there are any, logging what is new."""
        if not names:
            return []
        self.note(names)
        return [(b"x-tridentlm-ignored-params", self.header(names))]

    @staticmethod
    def header(names: Iterable[str]) -> bytes:
        """The value of `x-tridentlm-ignored-params`; names that no header can hold as '?'."""
        shown = [name if _is_token(name) else "?" for name in sorted(names)]
        rest = len(shown) - _MAX_NAMED
        if rest > 0:
            shown = [*shown[:_MAX_NAMED], f"+{rest}"]
        return ",".join(shown).encode()


def _is_token(name: str) -> bool:
    return 0 < len(name) <= _MAX_NAME and name.isascii() and name.replace(".", "_").isidentifier()


def refuse_unbuilt(body: Mapping[str, Any], served: frozenset[str]) -> None:
    """Raises InvalidRequest for a known parameter that is not built and asks for something."""
    for name in body:
        if (
            name in OFF
            and name not in served
            and body[name] is not None
            and not OFF[name](body[name])
        ):
            raise InvalidRequest(
                f"{name} is not supported by this server.",
                param=name,
                code="unsupported_parameter",
            )


def unknown_fields(body: Mapping[str, Any], served: frozenset[str]) -> list[str]:
    return [name for name in body if name not in served and name not in OFF and name not in LABELS]


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A boolean field; unset and null are false. Raises InvalidRequest for another type."""
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequest(f"{name} must be true or false, got {value!r}.", param=name)


def count(body: Mapping[str, Any], name: str, most: int) -> int:
    """A number from 1 to `most`; unset and null are 1. Raises InvalidRequest for anything else."""
    value = body.get(name)
    if value is None:
        return 1
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidRequest(
            f"{name} must be an integer from 1 to {most}, got {value!r}.", param=name
        )
    return value


def sampling_of(
    body: Mapping[str, Any],
    default_max_tokens: int | None,
    default_timeout: float,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The sampling fields that the body sets and `more`, checked, with the proxy's defaults."""
    sampling = {n: body[n] for n in SAMPLING if body.get(n) is not None} | dict(more or {})
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else None
    if limit is not None:
        sampling["max_tokens"] = body[limit]
    elif default_max_tokens is not None:
        sampling.setdefault("max_tokens", default_max_tokens)
    if default_timeout:
        sampling.setdefault("timeout", default_timeout)
    if isinstance(body.get("safety_identifier"), str):  # OpenAI's newer name
        sampling.setdefault("user", body["safety_identifier"])
    try:
        SamplingParams.from_mapping(sampling)
    except InvalidRequest as error:
        if limit is not None and error.param == "max_tokens":
            raise InvalidRequest(error.message.replace("max_tokens", limit), param=limit) from None
        raise
    return sampling
