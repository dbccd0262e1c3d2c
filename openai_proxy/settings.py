"""Settings of the proxy: keyword, TRIDENTLM_PROXY_<NAME>, TRIDENTLM_<NAME> or the default."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson
from tridentlm.errors import InvalidRequest

TOOL_FORMATS = ("", "none", "hermes", "llama3_json", "mistral")
THOUGHT_FORMATS = ("", "none", "think")
PREFIXES = ("TRIDENTLM_PROXY_", "TRIDENTLM_")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """`triton`: HOST:PORT of Triton's gRPC. `triton_metrics`: URL of its metrics ("": not merged).

    `timeout` (seconds, 0: none) is for requests that name no timeout of their own. `drain_seconds`:
    how long running requests may go on after SIGTERM. `tls_*` are PEM files for the way to Triton;
    any of them turns TLS on. `tool_parser` and `reasoning_parser` name formats ("": from the chat
    template). `sse_keep_alive`: seconds of silence, 0 for never. `cors_origins`: comma separated,
    "*" for all. `started`: unix time, the models' `created`, the same in all workers.
    """

    triton: str = "127.0.0.1:8001"
    triton_metrics: str = ""
    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = 1
    api_key: str = ""
    max_body_mb: float = 32.0
    timeout: float = 0.0
    drain_seconds: float = 20.0
    log_json: bool = False
    engine: str = "engine"
    submit: str = "submit"
    tokenizer_model: str = "tokenizer"
    trust_request_chat_template: bool = False
    tool_parser: str = ""
    reasoning_parser: str = ""
    sse_keep_alive: float = 0.0
    max_stored_responses: int = 512
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    cors_origins: str = ""
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InvalidRequest("workers must be at least 1.", param="workers")
        if self.max_body_mb <= 0:
            raise InvalidRequest("max_body_mb must be positive.", param="max_body_mb")
        for name in ("timeout", "drain_seconds", "sse_keep_alive", "max_stored_responses"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must not be negative.", param=name)
        for name, known in (("tool_parser", TOOL_FORMATS), ("reasoning_parser", THOUGHT_FORMATS)):
            if getattr(self, name) not in known:
                names = ", ".join(filter(None, known))
                raise InvalidRequest(f"{name} must be one of {names}.", param=name)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidRequest("tls_cert and tls_key go together.", param="tls_cert")
        for name in ("tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise InvalidRequest(f"{name}: there is no file {path}.", param=name)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * (1 << 20))

    @property
    def uses_tls(self) -> bool:
        return self.tls or bool(self.tls_ca or self.tls_cert)

    def to_json(self) -> str:
        """For a worker process; `from_json` reads it back."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> ProxySettings:
        return cls(**orjson.loads(text))

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **given: Any
    ) -> ProxySettings:
        """`given` wins (None: not given). Raises InvalidRequest for a value of the wrong type."""
        environ = os.environ if environ is None else environ
        values = {name: value for name, value in given.items() if value is not None}
        kinds: dict[str, Callable[[str], Any]] = {
            "int": int,
            "float": float,
            "bool": _boolean,
            "str": str,
        }
        for spec in fields(cls):
            texts = (environ.get(prefix + spec.name.upper(), "") for prefix in PREFIXES)
            text = next(filter(None, texts), "")
            if spec.name in values or not text:
                continue
            try:
                values[spec.name] = kinds[str(spec.type)](text)
            except ValueError:
                raise InvalidRequest(
                    f"{spec.name} must be of type {spec.type}, got {text!r}.", param=spec.name
                ) from None
        return cls(**values)


def _boolean(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE
