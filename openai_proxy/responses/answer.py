"""The answer of /v1/responses: the response object, and the events that build it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from openai_proxy.answers import usage_of
from openai_proxy.logprobs import block_of, extras_of
from openai_proxy.output import OutputParser
from openai_proxy.protocol import Job
from openai_proxy.responses.items import Event, ItemBuilder, turn_of
from openai_proxy.responses.request import ResponseSpec
from openai_proxy.responses.store import ResponseStore
from tridentlm.errors import TridentError
from tridentlm_client import Delta, Stream


class ResponseChoice:
    """The events of the answer's items; `builder` holds the items.

    With `tells_logprobs` the deltas are taken apart into tokens: a token has its log-probability
    where its text is, so those of thoughts and calls are not told.
    """

    def __init__(
        self,
        stream: Stream,
        parser: OutputParser,
        numbers: Iterable[int],
        *,
        tells_logprobs: bool,
    ) -> None:
        self.stream = stream
        self.completion_tokens = 0
        self.parser = parser
        self.builder = ItemBuilder()
        self._numbers = iter(numbers)
        self._tells_logprobs = tells_logprobs
        self._length = 0

    def text(self, deltas: list[Delta]) -> bytes | None:
        self.completion_tokens += sum(delta.count for delta in deltas)
        if self._tells_logprobs:
            return self.written(self._told(deltas)) or None
        return self.written(self.builder.push(self.parser.push(deltas))) or None

    def finish(self) -> bytes:
        events = self.builder.push(self.parser.flush())
        return self.written(events + self.builder.close(_item_status(self.stream)))

    def written(self, events: Sequence[Event]) -> bytes:
        return b"".join(
            b"event: %s\ndata: %s\n\n"
            % (event["type"].encode(), orjson.dumps(event | {"sequence_number": number}))
            for event, number in zip(events, self._numbers, strict=False)
        )

    def _told(self, deltas: list[Delta]) -> list[Event]:
        events: list[Event] = []
        for token in self._tokens(deltas):
            thoughts = self.parser.reasoning_tokens
            pieces = self.parser.push([token])
            if self.parser.reasoning_tokens == thoughts:
                entries = extras_of([token], "logprobs")
                self.builder.hold(block_of(entries, chat=True)["content"])
            events += self.builder.push(pieces)
        return events

    def _tokens(self, deltas: list[Delta]) -> Iterator[Delta]:
        """A delta for each entry; text whose entry comes later counts nothing yet."""
        for delta in deltas:
            text, begin = delta.text, self._length
            self._length += len(text)
            entries = extras_of([delta], "logprobs")
            if not entries:
                yield Delta(text, 0)
                continue
            cuts = [0, *(max(entry[0] - begin, 0) for entry in entries[1:]), len(text)]
            for entry, (start, end) in zip(entries, itertools.pairwise(cuts), strict=True):
                yield Delta(text[start:end], 1, {"logprobs": [entry]})


def _item_status(stream: Stream) -> str:
    cut = stream.end is None or stream.end.finish_reason != "stop"
    return "incomplete" if cut else "completed"


class ResponseAnswer:
    """One answer, which goes to the store when it is finished."""

    def __init__(
        self, job: Job, spec: ResponseSpec, streams: Sequence[Stream], store: ResponseStore
    ) -> None:
        self._job = job
        self._spec = spec
        self._store = store
        parser = OutputParser(None, None) if job.output is None else job.output.parser()
        tells = job.submissions[0].sampling.get("logprobs") is not None
        self._choice = ResponseChoice(streams[0], parser, itertools.count(), tells_logprobs=tells)
        self.choices = [self._choice]

    def opening(self) -> list[bytes]:
        response = self.response("in_progress")
        names = ("response.created", "response.in_progress")
        return [self._choice.written([{"type": name, "response": response}]) for name in names]

    def closing(self) -> list[bytes]:
        response = self._finished()
        name = "response." + response["status"]
        return [self._choice.written([{"type": name, "response": response}])]

    def failure(self, error: TridentError) -> list[bytes]:
        closed = self._choice.builder.close("incomplete")
        response = self.failed(error)
        return [self._choice.written([*closed, {"type": "response.failed", "response": response}])]

    def collect(self, stream: Stream) -> None:
        self._choice.text(stream.take())

    def whole(self) -> bytes:
        self.collect(self._choice.stream)
        self._choice.finish()
        return orjson.dumps(self._finished())

    def failed(self, error: TridentError) -> dict[str, Any]:
        """The response that ended with `error`; stored."""
        code = error.code or error.type
        return self._put(
            self.response("failed") | {"error": {"code": code, "message": error.message}}
        )

    def cancelled(self) -> dict[str, Any]:
        return self._put(self.response("cancelled"))

    def _finished(self) -> dict[str, Any]:
        end = self._choice.stream.end
        assert end is not None, "finished"
        cut = end.finish_reason == "length"
        response = self.response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        usage = self.usage()
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            # The client's types demand the second; nothing is charged as a write to the cache here.
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._choice.parser.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
        return self._put(response)

    def response(self, status: str) -> dict[str, Any]:
        """The response object as it is now."""
        return {
            "id": self._spec.id,
            "object": "response",
            "created_at": self._spec.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self._spec.echo,
            "output": self._choice.builder.items,
            "usage": None,
        }

    def usage(self) -> dict[str, Any]:
        return usage_of([self._choice.stream], 1)

    def _put(self, response: dict[str, Any]) -> dict[str, Any]:
        if self._spec.store:
            turn = turn_of(self._choice.builder.items)
            self._store.put(response, [*self._spec.messages, *turn])
        return response
