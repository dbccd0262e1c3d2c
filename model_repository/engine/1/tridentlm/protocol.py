"""The wire between Triton clients and the engine: names, frames, submissions, outcomes.

Shared by the adapters (server side) and `tridentlm_client` (client side); needs orjson alone.

A frame is one JSON array, made once a step for all requests of a session:

    [seq, uids, texts, counts, ends, extras, status]

    seq     1, 2, 3, ... in a session, without gaps, whatever stream carries it
    uids    requests with news in this frame; texts, counts: their text delta and its token count
    ends    {uid: end} of requests that ended: {"finish_reason", "stop_reason", "usage", "error"?}
    extras  {uid: {"token_ids": [ids], "logprobs": [entries], "prompt_logprobs": [entries]}} for
            requests that asked, each as far as there is news; an entry is a TokenLogprob
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


class Candidate(NamedTuple):
    """A token at one place. `rank`: 1 for the likeliest. -9999 stands for minus infinity.

    `token` is its text by itself; `raw` has its bytes where they are not that text's UTF-8.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    token: str
    raw: list[int] | None

    @property
    def bytes(self) -> list[int]:
        return list(self.token.encode()) if self.raw is None else self.raw


class TokenLogprob(NamedTuple):
    """What is told of one token: [offset, candidate, [candidates]] in a frame.

    `offset` is where its text begins in the request's text, in characters; None in
    `prompt_logprobs`. `top` are the likeliest, in falling order. A prompt's first token has no
    logprob and no `top`.
    """

    offset: int | None
    chosen: Candidate
    top: list[Candidate]

    @classmethod
    def unpack(cls, entry: list[Any]) -> TokenLogprob:
        offset, chosen, top = entry
        return cls(offset, Candidate(*chosen), [Candidate(*candidate) for candidate in top])


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
