"""What the proxy needs of a session with Triton, and how it makes one from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from openai_proxy.settings import ProxySettings
from tridentlm.errors import TridentError
from tridentlm_client import Session, Stream, Submission, TlsOptions


class SessionLike(Protocol):
    """The part of `tridentlm_client.Session` that the proxy uses."""

    @property
    def ready(self) -> bool: ...

    @property
    def status(self) -> dict[str, Any] | None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def submit(self, submissions: Sequence[Submission]) -> list[Stream | TridentError]: ...


NO_CONNECTION = "There is no connection to Triton yet."


def open_session(settings: ProxySettings) -> Session:
    tls = tls_options(settings)
    names = settings.engine_names()
    return Session(settings.triton, engine=names.engine, submit=names.submit, tls=tls)


def tls_options(settings: ProxySettings) -> TlsOptions | None:
    """None: no TLS."""
    if not settings.uses_tls:
        return None
    return TlsOptions(
        root_certificates=settings.tls_ca or None,
        private_key=settings.tls_key or None,
        certificate_chain=settings.tls_cert or None,
    )


def unready_reason(session: SessionLike) -> str | None:
    """Why requests cannot be served now; None when they can."""
    status = session.status
    if session.ready and status is not None:
        return None
    if status is None:
        return NO_CONNECTION
    if status.get("draining"):
        return "The server is shutting down."
    if not status.get("up"):
        return "The engine process is not running; it is being started again."
    return "The connection to Triton is lost; it is being made again."
