"""Python client of TridentLM: straight to Triton by gRPC, no proxy in between."""

from __future__ import annotations

from tridentlm.errors import (
    ContextLengthExceeded,
    EngineDown,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TridentError,
)
from tridentlm.protocol import Candidate, TokenLogprob
from tridentlm_client.client import AsyncClient, Client, ClientStream, Result
from tridentlm_client.session import Session
from tridentlm_client.stream import Delta, End, Stream, Submission
from tridentlm_client.wire import TlsOptions

__all__ = [
    "AsyncClient",
    "Candidate",
    "Client",
    "ClientStream",
    "ContextLengthExceeded",
    "Delta",
    "End",
    "EngineDown",
    "InternalError",
    "InvalidRequest",
    "ModelNotFound",
    "Overloaded",
    "Result",
    "Session",
    "Stream",
    "Submission",
    "TlsOptions",
    "TokenLogprob",
    "TridentError",
]
