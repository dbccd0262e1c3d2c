"""The wire between Triton clients and the engine: names, frames, submissions, outcomes.

Shared by the adapters (server side) and `tridentlm_client` (client side); needs orjson alone.

A frame is one JSON array, made once a step for all requests of a session:

    [seq, uids, texts, counts, ends, extras, status]

    seq     1, 2, 3, ... in a session, without gaps, whatever stream carries it
    uids    requests with news in this frame; texts, counts: their text delta and its token count
    ends    {uid: end} of requests that ended: {"finish_reason", "stop_reason", "usage", "error"?}
    extras  {uid: {"token_ids": [...]}} for requests that asked
    status  null, or the engine's `status` object: in a session's first frame, once a second, and
            whenever `up` or `draining` changes. A session without a frame for STALE_SECONDS has
            lost its engine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

VERSION = 1

ACK_FRAMES = 16
ACK_SECONDS = 1.0
STATUS_SECONDS = 1.0
STALE_SECONDS = 4.0
MAX_UNACKED = 64
ROLL_FRAMES = 4000
ROLL_BYTES = 16 << 20
TOMBSTONE_SECONDS = 10.0
RELAY_REPORT = 16
"""The relay tells the engine whenever it has passed on this many responses."""

HEARTBEAT = "heartbeat"
"""The `finish_reason` of a response that only lets the relay look for its client."""


class Op:
    """Values of the engine's `op` input.

    RELAYED and SUBMIT are what the ensembles send, PASSED is the relay's report.
    """

    GENERATE = "generate"
    RELAYED = "relayed"
    SUBMIT = "submit"
    SESSION = "session"
    ACK = "ack"
    ABORT = "abort"
    PASSED = "passed"
    CLOSE = "close"
    DRAIN = "drain"
    FLUSH_CACHE = "flush_cache"
    STATUS = "status"


class Frame(NamedTuple):
    seq: int
    uids: list[str]
    texts: list[str]
    counts: list[int]
    ends: dict[str, dict[str, Any]]
    extras: dict[str, dict[str, Any]]
    status: dict[str, Any] | None

    def pack(self) -> bytes:
        return orjson.dumps(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        return cls(*orjson.loads(data))
