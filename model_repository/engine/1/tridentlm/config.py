"""Settings of the engine, each from a flag, else TRIDENTLM_<NAME>, else config.pbtxt, else default.

The launcher hands its flags on as environment variables, so one function resolves all four. In a
repository of several models each engine's config.pbtxt has `precedence` = `config`: what it says
goes before the environment, which all engines share.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tridentlm.errors import InvalidRequest

PREFIX = "TRIDENTLM_"
PRECEDENCE, OWN_FIRST = "precedence", "config"
_PARAMETER = re.compile(r'key:\s*"(\w+)"\s*value:?\s*\{\s*string_value:\s*"((?:[^"\\]|\\.)*)"')
_NOT_NEGATIVE = (
    "num_pages",
    "max_model_len",
    "max_queue",
    "max_step_tokens",
    "max_mixed_tokens",
    "max_queued_tokens",
    "threads",
    "cuda_graph_max_batch",
    "cuda_graph_max_tokens",
)
_NOT_SIMULATED = {"tp": 1, "quantize": "none", "kv_dtype": "auto"}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`model` "": the bundled default. A size of 0: chosen from the model and the hardware.

    `served_model_name`: comma separated; the first is the model's name, the others its aliases.
    """

    model: str = ""
    served_model_name: str = ""
    tokenizer: str = ""
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    kv_dtype: str = "auto"
    load_format: str = "auto"
    backend: str = "auto"
    tp: int = 1
    rank_timeout: float = 300.0
    page_size: int = 0
    num_pages: int = 0
    kv_memory_gb: float = 0.0
    max_model_len: int = 0
    max_running: int = 256
    max_queue: int = 1024
    max_queued_tokens: int = 0
    session_share: float = 1.0
    user_share: float = 1.0
    max_step_tokens: int = 0
    max_mixed_tokens: int = 0
    prefix_cache: str = "radix"
    admission: str = "optimistic"
    policy: str = "fcfs"
    steps_in_flight: int = 0
    cuda_graph_max_batch: int = 256
    cuda_graph_max_tokens: int = 0
    threads: int = 0
    runner: str = "model"
    step_ms: float = 5.0
    drain_seconds: float = 20.0
    session_timeout: float = 10.0

    def __post_init__(self) -> None:
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("quantize", self.quantize, ("none", "fp8"))
        _one_of("runner", self.runner, ("model", "simulated"))
        _one_of("prefix_cache", self.prefix_cache, ("radix", "null"))
        _one_of("admission", self.admission, ("optimistic", "reserve"))
        _one_of("policy", self.policy, ("fcfs", "priority", "longest-prefix"))
        _one_of("kv_dtype", self.kv_dtype, ("auto", "fp8"))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("backend", self.backend, ("auto", "torch", "flashinfer"))
        _one_of("page_size", self.page_size, (0, 1, 2, 4, 8, 16, 32, 64, 128))
        _one_of("steps_in_flight", self.steps_in_flight, (0, 1, 2))
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must not be negative.", param=name)
        for name in ("session_share", "user_share"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidRequest(f"{name} must be in (0, 1].", param=name)
        if self.tp < 1:
            raise InvalidRequest("tp must be at least 1.", param="tp")
        if self.rank_timeout <= 0:
            raise InvalidRequest("rank_timeout must be more than 0.", param="rank_timeout")
        for name, none in _NOT_SIMULATED.items():
            if self.runner == "simulated" and getattr(self, name) != none:
                raise InvalidRequest(f"The simulated runner has no {name}.", param=name)
        if self.max_running < 1:
            raise InvalidRequest("max_running must be at least 1.", param="max_running")

    @property
    def served_names(self) -> tuple[str, ...]:
        names = (name.strip() for name in self.served_model_name.split(","))
        return tuple(filter(None, names))


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise InvalidRequest(f"{name} must be one of {names}; got {value!r}.", param=name)


def resolve_settings(
    parameters: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> EngineSettings:
    """Reads every setting from `environ` (default os.environ), then `parameters` of config.pbtxt;
    the other way round when the parameters say so.

    Raises InvalidRequest for a value of the wrong type or range, naming the setting.
    """
    environ = os.environ if environ is None else environ
    parameters = parameters or {}
    own_first = parameters.get(PRECEDENCE) == OWN_FIRST
    values: dict[str, Any] = {}
    for spec in fields(EngineSettings):
        places = [environ.get(PREFIX + spec.name.upper()), parameters.get(spec.name)]
        text = next(filter(None, reversed(places) if own_first else places), "")
        if text == "":
            continue
        kind: Any = type(spec.default)
        try:
            values[spec.name] = kind(text)
        except ValueError:
            raise InvalidRequest(
                f"{spec.name} must be of type {kind.__name__}, got {text!r}.", param=spec.name
            ) from None
    return EngineSettings(**values)


def read_parameters(config: Path) -> dict[str, str]:
    """The text parameters of a config.pbtxt."""
    lines = config.read_text().splitlines()
    found = _PARAMETER.findall("\n".join(x for x in lines if not x.lstrip().startswith("#")))
    return {name: re.sub(r"\\(.)", r"\1", value) for name, value in found}
