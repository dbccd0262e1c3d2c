"""The JSON of answers: stream events spliced from ready bytes, and whole responses.

event = head + text as JSON + tail       head and tail are made once per choice
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import orjson
from tridentlm import __version__
from tridentlm_client import Delta, Stream

from openai_proxy.protocol import Job

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
        chat = envelope.chat
        self._start = b"data: " + _dumps(envelope.fields(chunk=True))[:-1]
        self._start += b',"choices":[{"index":%d,' % index
        self._head = self._start + (b'"delta":{"content":' if chat else b'"text":')
        self._close = b"}" if chat else b""
        self._empty = b'"delta":{}' if chat else b'"text":""'
        self._rest = b',"logprobs":null,"finish_reason":null}]'
        self._end = (b',"usage":null' if job.include_usage else b"") + b"}\n\n"
        self._tail = self._close + self._rest + self._end
        self._plain = not self._continuous and self._held_ids is None

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
        if self._held_ids is not None:
            for delta in deltas:
                self._held_ids += (delta.extra or {}).get("token_ids", ())
        if not text:
            return None
        body = self._head + _dumps(text) + self._close + self._take_ids()
        return body + self._rest + self._usage_end()

    def finish(self) -> bytes:
        end = self.stream.end
        assert end is not None, "finish() before the end"
        self.completion_tokens = end.usage.get("completion_tokens", self.completion_tokens)
        reasons = _dumps({"finish_reason": end.finish_reason, "stop_reason": end.stop_reason})
        body = self._start + self._empty + self._take_ids() + b',"logprobs":null,' + reasons[1:]
        return body + b"]" + self._usage_end()

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


def usage_of(streams: Sequence[Stream], n: int) -> dict[str, Any]:
    """OpenAI's usage object over all choices, which must have ended.

    A prompt counts once, however many choices (`n`) it has; the tokens of all choices count.
    """
    usages = [stream.end.usage for stream in streams if stream.end is not None]
    prompt, cached = (
        sum(usage.get(name, 0) for usage in usages[::n])
        for name in ("prompt_tokens", "cached_tokens")
    )
    completion = sum(usage.get("completion_tokens", 0) for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_event(envelope: Envelope, usage: dict[str, Any]) -> bytes:
    chunk = {**envelope.fields(chunk=True), "choices": [], "usage": usage}
    return b"data: " + _dumps(chunk) + b"\n\n"


def whole_response(envelope: Envelope, job: Job, streams: Sequence[Stream]) -> bytes:
    """The answer to a request that does not stream, all `streams` having ended well."""
    choices = []
    for index, stream in enumerate(streams):
        end = stream.end
        assert end is not None, "whole_response() before the end"
        deltas = stream.take()
        text = "".join(delta.text for delta in deltas)
        if job.chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            choice: dict[str, Any] = {"index": index, "message": message}
        else:
            choice = {"index": index, "text": text}
        if job.submissions[index].return_token_ids:
            lists = ((delta.extra or {}).get("token_ids", ()) for delta in deltas)
            choice["token_ids"] = [token for ids in lists for token in ids]
        choice["logprobs"] = None
        choice["finish_reason"] = end.finish_reason
        choice["stop_reason"] = end.stop_reason
        choices.append(choice)
    body = {**envelope.fields(chunk=False), "choices": choices, "usage": usage_of(streams, job.n)}
    return _dumps(body)
