"""The answers of the chat and completions endpoints: what is streamed when, and whole responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from openai_proxy.chunks import DONE, Choice, Envelope, ParsedChoice, finish_reason_of
from openai_proxy.errors import error_body
from openai_proxy.logprobs import Whole, extras_of
from openai_proxy.output import message_of
from openai_proxy.protocol import Job
from tridentlm.errors import TridentError
from tridentlm_client import Delta, Stream


class ChoiceLike(Protocol):
    """Makes the events of one choice from its deltas."""

    stream: Stream
    completion_tokens: int

    def text(self, deltas: list[Delta]) -> bytes | None: ...

    def finish(self) -> bytes: ...


class AnswerLike(Protocol):
    """How an endpoint answers. Events are whole; a list's items are written one by one."""

    @property
    def choices(self) -> Sequence[ChoiceLike]: ...

    def opening(self) -> list[bytes]:
        """Before the first text."""
        ...

    def closing(self) -> list[bytes]:
        """After every choice has finished; at least one event."""
        ...

    def failure(self, error: TridentError) -> list[bytes]:
        """Instead of the rest, when the answer breaks off; at least one event."""
        ...

    def collect(self, stream: Stream) -> None:
        """Takes what has come on `stream`, for an answer that does not stream."""
        ...

    def whole(self) -> bytes:
        """The body of an answer that does not stream, when every choice has ended well."""
        ...

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, when every choice has ended."""
        ...


class Answer:
    """Chat and text completions."""

    def __init__(self, job: Job, streams: Sequence[Stream]) -> None:
        self._job = job
        self._streams = streams
        self._envelope = Envelope(job)
        self._reasoning_tokens: int | None = None
        self._wholes: dict[Stream, Whole] = {}
        self.choices: list[Choice] = []
        if not job.stream:
            self._wholes = {stream: Whole(stream, chat=job.chat) for stream in streams}
        else:
            self.choices = [self._choice(i, stream) for i, stream in enumerate(streams)]

    def _choice(self, index: int, stream: Stream) -> Choice:
        output = self._job.output
        if output is None:
            return Choice(self._envelope, self._job, index, stream)
        return ParsedChoice(self._envelope, self._job, index, stream, output.parser())

    def opening(self) -> list[bytes]:
        return [choice.role() for choice in self.choices] if self._job.chat else []

    def closing(self) -> list[bytes]:
        if not self._job.include_usage:
            return [DONE]
        chunk = {**self._envelope.fields(chunk=True), "choices": [], "usage": self.usage()}
        return [b"data: " + orjson.dumps(chunk) + b"\n\n", DONE]

    def failure(self, error: TridentError) -> list[bytes]:
        return [b"data: " + error_body(error) + b"\n\n", DONE]

    def usage(self) -> dict[str, Any]:
        usage = usage_of(self._streams, self._job.n)
        if self._job.output is not None and self._job.output.reasoning:
            tokens = self._reasoning_tokens
            if tokens is None:
                tokens = sum(choice.reasoning_tokens for choice in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": tokens}
        return usage

    def collect(self, stream: Stream) -> None:
        self._wholes[stream].collect()

    def whole(self) -> bytes:
        self._reasoning_tokens = 0
        choices = [self._whole_choice(i, *pair) for i, pair in enumerate(self._wholes.items())]
        fields = self._envelope.fields(chunk=False)
        for choice in choices if self._job.chat else ():
            if "prompt_logprobs" in choice:  # vLLM has them in a completion's choices only
                fields["prompt_logprobs"] = choice.pop("prompt_logprobs")
        return orjson.dumps({**fields, "choices": choices, "usage": self.usage()})

    def _whole_choice(self, index: int, stream: Stream, whole: Whole) -> dict[str, Any]:
        end = stream.end
        assert end is not None, "whole() before the end"
        whole.collect()
        deltas, job = whole.deltas, self._job
        choice: dict[str, Any] = {"index": index}
        reason = end.finish_reason
        if job.output is not None:
            parser = job.output.parser()
            choice["message"] = message_of(parser.push(deltas) + parser.flush())
            reason = finish_reason_of(reason, parser)
            self._reasoning_tokens = (self._reasoning_tokens or 0) + parser.reasoning_tokens
        else:
            text = "".join(delta.text for delta in deltas)
            if job.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
        if job.submissions[index].return_token_ids:
            choice["token_ids"] = extras_of(deltas, "token_ids")
        return {
            **choice,
            **whole.prompt(),
            "logprobs": whole.block(),
            "finish_reason": reason,
            "stop_reason": end.stop_reason,
        }


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
