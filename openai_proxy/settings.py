"""Settings of the proxy: keyword, TRIDENTLM_PROXY_<NAME>, TRIDENTLM_<NAME> or the default."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from tridentlm.errors import InvalidRequest

TOOL_FORMATS = ("", "none", "hermes", "llama3_json", "mistral")
THOUGHT_FORMATS = ("", "none", "think")
PREFIXES = ("TRIDENTLM_PROXY_", "TRIDENTLM_")
PORTS = range(1, 65536)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class EngineNames(NamedTuple):
    """One engine in Triton and what stands in front of it."""

    engine: str
    submit: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """`triton`: HOST:PORT of Triton's gRPC. `triton_metrics`: URL of its metrics ("": not merged).

    `timeout` (seconds, 0: none) is for requests that name no timeout of their own. `drain_seconds`:
    how long running requests may go on after SIGTERM. `tls_*` are PEM files for the way to Triton;
    any of them turns TLS on. `engine`: the only engine to use ("": every one that Triton has);
    `submit` and `tokenizer_model` go with it ("": by its name). `tool_parser` and
    `reasoning_parser`: FORMAT or MODEL=FORMAT, comma separated ("": from the chat template).
    `sse_keep_alive`: seconds of silence, 0 for never. `cors_origins`: comma separated, "*" for all.
    `record_failures`: a folder ("": nothing is recorded). `started`: unix time, the models'
    `created`, the same in all workers.
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
    engine: str = ""
    submit: str = ""
    tokenizer_model: str = ""
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
    record_failures: str = ""
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if self.port not in PORTS:
            raise InvalidRequest(f"port must be in 1 to 65535, got {self.port}.", param="port")
        if not _is_address(self.triton):
            raise InvalidRequest(f"triton must be HOST:PORT, got {self.triton!r}.", param="triton")
        if self.workers < 1:
            raise InvalidRequest("workers must be at least 1.", param="workers")
        if self.max_body_mb <= 0:
            raise InvalidRequest("max_body_mb must be positive.", param="max_body_mb")
        for name in ("timeout", "drain_seconds", "sse_keep_alive", "max_stored_responses"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must not be negative.", param=name)
        for name, known in (("tool_parser", TOOL_FORMATS), ("reasoning_parser", THOUGHT_FORMATS)):
            for part in getattr(self, name).split(","):
                if part.rpartition("=")[2].strip() not in known:
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

    def engine_names(self) -> EngineNames:
        """The names of the engine that is set, or of a repository's first one."""
        engine = self.engine or "engine"
        prefix = engine.removesuffix("engine")
        return EngineNames(
            engine, self.submit or f"{prefix}submit", self.tokenizer_model or f"{prefix}tokenizer"
        )

    def for_engine(self, names: EngineNames) -> ProxySettings:
        return replace(
            self, engine=names.engine, submit=names.submit, tokenizer_model=names.tokenizer
        )

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


def format_for(choices: str, model: str) -> str:
    """What `tool_parser` or `reasoning_parser` says for one model; "": nothing."""
    general = ""
    for part in choices.split(","):
        name, given, kind = (text.strip() for text in part.rpartition("="))
        if given and name == model:
            return kind
        if not given:
            general = kind
    return general


def _is_address(text: str) -> bool:
    """Whether it is HOST:PORT; an IPv6 address has brackets."""
    try:
        where = urlsplit(f"//{text}")
        return bool(where.hostname) and where.netloc == text and where.port in PORTS
    except ValueError:
        return False


def _boolean(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE
