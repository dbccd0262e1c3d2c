"""The events of streaming answers, spliced from ready bytes.

event = head + text as JSON + tail       head and tail are made once per choice
"""

from __future__ import annotations

import os
import time
from typing import Any

import orjson

from openai_proxy.logprobs import NULL, extras_of, json_of
from openai_proxy.output import OutputParser, delta_of
from openai_proxy.protocol import Job
from openai_proxy.tools import Piece
from tridentlm import __version__
from tridentlm_client import Delta, Stream

MANY = 64
"""So many log-probabilities, of a long prompt that is echoed, do not wait for text."""

FINGERPRINT = f"tridentlm-{__version__}"
DONE = b"data: [DONE]\n\n"
_dumps = orjson.dumps


class Envelope:
    """What all chunks of one response share. `created` is unix time in seconds."""

    def __init__(self, job: Job) -> None:
        self.chat = job.chat
        self.model = job.model
        self.id = ("chatcmpl-" if job.chat else "cmpl-") + os.urandom(12).hex()
        self.created = int(time.time())

    def fields(self, *, chunk: bool) -> dict[str, Any]:
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        else:
            kind = "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


class Choice:
    """Makes the events of one choice; counts its tokens for the usage."""

    def __init__(self, envelope: Envelope, job: Job, index: int, stream: Stream) -> None:
        self.stream = stream
        self.completion_tokens = 0
        self._continuous = job.continuous_usage
        self._held_ids: list[int] | None = [] if job.submissions[0].return_token_ids else None
        asks = job.submissions[0].sampling.get("logprobs") is not None
        self._held_logprobs: list[Any] | None = [] if asks else None
        self._chat = chat = envelope.chat
        self._start = b"data: " + _dumps(envelope.fields(chunk=True))[:-1]
        self._start += b',"choices":[{"index":%d,' % index
        self._head = self._start + (b'"delta":{"content":' if chat else b'"text":')
        self._close = b"}" if chat else b""
        self._empty = b'"delta":{}' if chat else b'"text":""'
        self._rest = b',"logprobs":null,"finish_reason":null}]'
        self._end = (b',"usage":null' if job.include_usage else b"") + b"}\n\n"
        self._tail = self._close + self._rest + self._end
        self._plain = not self._continuous and self._held_ids is None and not asks

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def role(self) -> bytes:
        opening = b'"delta":{"role":"assistant","content":""}'
        return self._start + opening + self._rest + self._usage_end()

    def text(self, deltas: list[Delta]) -> bytes | None:
        """One event for `deltas`; None when they hold no text (a held-back stop string or byte)."""
        if len(deltas) == 1:
            text = deltas[0].text
            self.completion_tokens += deltas[0].count
        else:
            text = "".join(delta.text for delta in deltas)
            self.completion_tokens += sum(delta.count for delta in deltas)
        if self._plain:
            return self._head + _dumps(text) + self._tail if text else None
        self._hold(deltas)
        if not text and len(self._held_logprobs or ()) < MANY:
            return None
        return self._head + _dumps(text) + self._close + self._more()

    def finish(self) -> bytes:
        end = self.stream.end
        assert end is not None, "finish() before the end"
        self.completion_tokens = end.usage.get("completion_tokens", self.completion_tokens)
        reason = self._reason(end.finish_reason)
        reasons = _dumps({"finish_reason": reason, "stop_reason": end.stop_reason})
        body = self._start + self._empty + self._take_ids() + self._take_logprobs()
        return body + b"," + reasons[1:] + b"]" + self._usage_end()

    def _reason(self, finish_reason: str) -> str:
        return finish_reason

    def _hold(self, deltas: list[Delta]) -> None:
        """Keeps what the deltas carry beside text for the next event that is written."""
        if self._held_ids is not None:
            self._held_ids += extras_of(deltas, "token_ids")
        if self._held_logprobs is not None:
            self._held_logprobs += extras_of(deltas, "logprobs")

    def _more(self) -> bytes:
        """What follows an event's text when a request has asked for more than text."""
        told = self._take_logprobs()
        return self._take_ids() + told + b',"finish_reason":null}]' + self._usage_end()

    def _take_logprobs(self) -> bytes:
        if not self._held_logprobs:
            return NULL
        entries, self._held_logprobs = self._held_logprobs, []
        return json_of(entries, chat=self._chat)

    def _take_ids(self) -> bytes:
        if not self._held_ids:
            return b""
        ids, self._held_ids = self._held_ids, []
        return b',"token_ids":' + _dumps(ids)

    def _usage_end(self) -> bytes:
        if not self._continuous:
            return self._end
        prompt, completion = self.stream.prompt_tokens, self.completion_tokens
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
            prompt,
            completion,
            prompt + completion,
        )


class ParsedChoice(Choice):
    """A choice whose text is cut into thoughts, content and tool calls, each piece an event."""

    def __init__(
        self, envelope: Envelope, job: Job, index: int, stream: Stream, parser: OutputParser
    ) -> None:
        super().__init__(envelope, job, index, stream)
        self._parser = parser

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def text(self, deltas: list[Delta]) -> bytes | None:
        for delta in deltas:
            self.completion_tokens += delta.count
        self._hold(deltas)
        return self._events(self._parser.push(deltas)) or None

    def finish(self) -> bytes:
        return self._events(self._parser.flush()) + super().finish()

    def _events(self, pieces: list[Piece]) -> bytes:
        return b"".join([self._event(piece) for piece in pieces])

    def _event(self, piece: Piece) -> bytes:
        if piece.kind == "content":
            return self._head + _dumps(piece.text) + self._close + self._more()
        return self._start + b'"delta":' + _dumps(delta_of(piece)) + self._more()

    def _reason(self, finish_reason: str) -> str:
        return finish_reason_of(finish_reason, self._parser)


def finish_reason_of(finish_reason: str, parser: OutputParser) -> str:
    """A model that stopped after a call waits for its result."""
    return "tool_calls" if parser.calls and finish_reason == "stop" else finish_reason
