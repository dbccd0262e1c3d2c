"""KServe's gRPC messages, as far as a session needs them, and the way to a Triton server.

The messages are built by hand: tritonclient's asyncio client drops the id of an error and cannot
ask for empty final responses. The `triton_grpc_error` metadata is never set, because Triton before
2.69 crashes on it when a stream carries more than one request.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tridentlm.errors import EngineDown, InternalError, TridentError, from_payload

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Back-off is the session's: a channel must not remember that an earlier one failed.
    ("grpc.use_local_subchannel_pool", 1),
]

UNAVAILABLE_TEXTS = (
    "not ready",
    "unavailable",
    "no available versions",
    "not healthy",
    "server is stopping",
)
NO_SESSION = "no_session"

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files in PEM format. Without `root_certificates` the system's are used."""

    root_certificates: str | Path | None = None
    private_key: str | Path | None = None
    certificate_chain: str | Path | None = None

    def credentials(self) -> Any:
        """gRPC's channel credentials. Raises OSError for a file that cannot be read."""
        files = (self.root_certificates, self.private_key, self.certificate_chain)
        return grpc.ssl_channel_credentials(*(Path(f).read_bytes() if f else None for f in files))


def open_channel(target: str, credentials: Any = None) -> Any:
    """A grpc.aio channel to `host:port`; must be called in a running event loop."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


def pack_strings(values: Sequence[str | bytes]) -> bytes:
    """A BYTES tensor's content: each element after its length, a little-endian uint32."""
    parts: list[bytes] = []
    for value in values:
        data = value.encode() if isinstance(value, str) else value
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def infer_request(
    model: str,
    request_id: str = "",
    *,
    strings: Mapping[str, Sequence[str | bytes]],
    parameters: Mapping[str, str | int | bool],
    empty_final: bool = False,
) -> Any:
    """A ModelInferRequest with one-dimensional BYTES inputs and request parameters.

    `empty_final` asks Triton to send the final response even when it carries no output.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, values in strings.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
        request.raw_input_contents.append(pack_strings(values))
    for name, value in parameters.items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, int):
            request.parameters[name].int64_param = value
        else:
            request.parameters[name].string_param = value
    if empty_final:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def read_string(response: Any, name: str) -> memoryview | None:
    """The only element of a BYTES[1] output of a ModelInferResponse; None when it is absent."""
    for i, output in enumerate(response.outputs):
        if output.name == name:
            return memoryview(response.raw_output_contents[i])[_LENGTH.size :]
    return None


def is_final(response: Any) -> bool:
    """True for the last response to a request."""
    parameters = response.parameters
    return "triton_final_response" in parameters and bool(
        parameters["triton_final_response"].bool_param
    )


def find_payload(text: str) -> dict[str, Any] | None:
    """The error payload inside an error text, which Triton may have prefixed."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        payload, _ = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    return payload if isinstance(payload, dict) and "message" in payload else None


def says_unavailable(text: str) -> bool:
    """True when the session cannot go on: the engine forgot it, or Triton stops or unloads."""
    payload = find_payload(text)
    if payload is not None:
        return payload.get("code") == NO_SESSION
    lowered = text.lower()
    return any(words in lowered for words in UNAVAILABLE_TEXTS)


def parse_error(text: str) -> TridentError:
    """The error that a response's `error_message` stands for."""
    payload = find_payload(text)
    if says_unavailable(text):
        return EngineDown(text if payload is None else str(payload["message"]))
    return InternalError(text) if payload is None else from_payload(payload)
