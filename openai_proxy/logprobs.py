"""Log-probabilities: what a request may ask, and OpenAI's two shapes of the answer.

    chat         {"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}, ...]}
    completions  {"tokens", "token_logprobs", "top_logprobs": [{token: logprob}], "text_offset"}

Every token counted in `completion_tokens` has an entry, an ending one too. In the completions'
`top_logprobs` the token itself comes first. Minus infinity is -9999.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

from openai_proxy import parameters
from tridentlm.core.params import MAX_LOGPROBS
from tridentlm.errors import InvalidRequest
from tridentlm_client import Candidate, Delta, Stream, TokenLogprob

CHAT_FIELDS = frozenset({"logprobs", "top_logprobs", "prompt_logprobs"})
COMPLETION_FIELDS = frozenset({"logprobs", "prompt_logprobs", "echo"})
COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
NULL = b',"logprobs":null'
_dumps = orjson.dumps


def chat_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a chat's `logprobs` (true) and `top_logprobs` (how many)."""
    asks, top = parameters.flag(body, "logprobs"), body.get("top_logprobs")
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_LOGPROBS):
        raise InvalidRequest(
            f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {top!r}.",
            param="top_logprobs",
        )
    if top and not asks:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return _with_prompt(body, {"logprobs": top or 0} if asks else {})


def completion_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of `logprobs` (how many) and `echo`."""
    names = ("logprobs", "echo")
    return _with_prompt(body, {name: body[name] for name in names if body.get(name) is not None})


def _with_prompt(body: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    if body.get("prompt_logprobs") is not None:
        if body.get("stream"):
            raise InvalidRequest(
                "prompt_logprobs are not available with stream: true.", param="prompt_logprobs"
            )
        sampling["prompt_logprobs"] = body["prompt_logprobs"]
    return sampling


def extras_of(deltas: Sequence[Delta], name: str) -> list[Any]:
    """What the deltas carry under `name`, one after another."""
    return [item for delta in deltas for item in (delta.extra or {}).get(name, ())]


def block_of(entries: Sequence[Any], *, chat: bool) -> dict[str, Any]:
    """The `logprobs` object of a choice, from entries as they come over the wire."""
    told = [TokenLogprob.unpack(entry) for entry in entries]
    if chat:
        return {"content": [_chat_entry(token) for token in told], "refusal": None}
    return {
        "tokens": [token.chosen.token for token in told],
        "token_logprobs": [token.chosen.logprob for token in told],
        "top_logprobs": [_likeliest(token) for token in told],
        "text_offset": [token.offset for token in told],
    }


class Whole:
    """What comes on a stream whose answer is told as a whole; `deltas` without log-probabilities.

    Those become JSON as they come. At the end, those of a long prompt would hold up everybody's
    streams for half a second; as bytes the garbage collector need not look through them.
    """

    def __init__(self, stream: Stream, *, chat: bool) -> None:
        self.deltas: list[Delta] = []
        self._stream = stream
        self._chat = chat
        self._names = ("content",) if chat else COMPLETION_LISTS
        self._lists: dict[str, list[bytes]] = {}

    def collect(self) -> None:
        deltas = self._stream.take()
        if entries := extras_of(deltas, "logprobs"):
            block = block_of(entries, chat=self._chat)
            for name in self._names:
                self._lists.setdefault(name, []).append(_dumps(block[name])[1:-1])
        if entries := extras_of(deltas, "prompt_logprobs"):
            values = _dumps(prompt_logprobs_of(entries))[1:-1]
            self._lists.setdefault("prompt_logprobs", []).append(values)
        self.deltas += [_without_logprobs(delta) if delta.extra else delta for delta in deltas]

    def block(self) -> dict[str, Any] | None:
        """The `logprobs` object of the choice; None when nothing was told."""
        if self._names[0] not in self._lists:
            return None
        block: dict[str, Any] = {name: self._joined(name) for name in self._names}
        return block | {"refusal": None} if self._chat else block

    def prompt(self) -> dict[str, Any]:
        """The member `prompt_logprobs`, where it was asked for."""
        name = "prompt_logprobs"
        return {name: self._joined(name)} if name in self._lists else {}

    def _joined(self, name: str) -> orjson.Fragment:
        return orjson.Fragment(b"[" + b",".join(self._lists[name]) + b"]")


def _without_logprobs(delta: Delta) -> Delta:
    return delta._replace(extra={"token_ids": (delta.extra or {}).get("token_ids", ())})


def json_of(entries: Sequence[Any], *, chat: bool) -> bytes:
    """`block_of` as the member of a JSON object; null without entries.

    A stream's chat entries are spliced, in about a third of the time.
    """
    if not entries:
        return NULL
    if not chat:
        return b',"logprobs":' + _dumps(block_of(entries, chat=False))
    content = b",".join([_spliced(entry) for entry in entries])
    return b',"logprobs":{"content":[' + content + b'],"refusal":null}'


def _spliced(entry: Sequence[Any]) -> bytes:
    """`_chat_entry` as JSON, straight from what the wire has."""
    _, chosen, top = entry
    told = b"},".join([_opening(other) + _dumps(other[1]) for other in top])
    own = _opening(chosen) + _dumps(chosen[1])
    return own + b',"top_logprobs":[' + told + (b"}]}" if top else b"]}")


def _opening(candidate: Sequence[Any]) -> bytes:
    _, _, _, token, raw = candidate
    return _spelled(token) if raw is None else _spell(token, raw)


@lru_cache(65536)
def _spelled(token: str) -> bytes:
    return _spell(token, list(token.encode()))


def _spell(token: str, raw: list[int]) -> bytes:
    return b'{"token":' + _dumps(token) + b',"bytes":' + _dumps(raw) + b',"logprob":'


def prompt_logprobs_of(entries: Sequence[Any]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, for each token of the prompt; None for the first."""
    told = [TokenLogprob.unpack(entry) for entry in entries]
    return [
        {
            str(candidate.token_id): {
                "logprob": candidate.logprob,
                "rank": candidate.rank,
                "decoded_token": candidate.token,
            }
            for candidate in (token.chosen, *token.top)
        }
        if token.chosen.logprob is not None
        else None
        for token in told
    ]


def _chat_entry(token: TokenLogprob) -> dict[str, Any]:
    return _candidate(token.chosen) | {"top_logprobs": [_candidate(other) for other in token.top]}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "token": candidate.token,
        "logprob": candidate.logprob,
        "bytes": candidate.bytes,
    }


def _likeliest(token: TokenLogprob) -> dict[str, float | None] | None:
    """Of tokens with one text the first stays: the token itself, or the likeliest."""
    if token.chosen.logprob is None:
        return None
    likeliest: dict[str, float | None] = {}
    for candidate in (token.chosen, *token.top):
        likeliest.setdefault(candidate.token, candidate.logprob)
    return likeliest
