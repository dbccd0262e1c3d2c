"""POST /generate: text in, text out, by the names of Triton's own generate endpoint.

{"text_input": "Once", "max_tokens": 8}    data: {"text_output": " upon"}
                                           data: {"text_output": "", "finish_reason": "length",
                                                  "usage": {...}}
                                           data: [DONE]

Fields may also stand in an object `parameters`, as Triton's endpoint has it.
Log-probabilities are asked for and told as in a completion, beside the text of their event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from openai_proxy import logprobs, parameters, structured
from openai_proxy.answers import usage_of
from openai_proxy.chunks import DONE, MANY
from openai_proxy.errors import error_body
from openai_proxy.generate import GenerateEndpoint, ProxyState
from openai_proxy.logprobs import Whole, block_of, extras_of
from openai_proxy.protocol import Job
from openai_proxy.settings import ProxySettings
from openai_proxy.structured import wanted_of
from tridentlm.errors import InvalidRequest, TridentError
from tridentlm_client import Delta, Stream, Submission

FIELDS = (
    parameters.SAMPLING
    | structured.FIELDS
    | logprobs.COMPLETION_FIELDS
    | {"model", "text_input", "prompt", "stream"}
)


def parse_generate(body: Mapping[str, Any], model: str, settings: ProxySettings) -> Job:
    """Raises InvalidRequest. It streams unless `stream` is false."""
    nested = body.get("parameters") or {}
    if not isinstance(nested, dict):
        raise InvalidRequest("parameters must be an object.", param="parameters")
    body = {**nested, **body, "parameters": None}
    parameters.refuse_unbuilt(body, FIELDS)
    name = "prompt" if body.get("text_input") is None else "text_input"
    if not isinstance(body.get(name), str):
        raise InvalidRequest("text_input must be a string.", param="text_input")
    stream = body.get("stream") is None or parameters.flag(body, "stream")
    told = logprobs.completion_sampling({**body, "stream": stream})
    sampling = parameters.sampling_of(body, None, settings.timeout, told)
    return Job(
        chat=False,
        model=model,
        submissions=[Submission(prompt=body[name], sampling=sampling)],
        n=1,
        stream=stream,
        include_usage=True,
        continuous_usage=False,
        timeout=sampling.get("timeout"),
        ignored=parameters.unknown_fields(body, FIELDS),
        wanted=wanted_of(body),
        renamed={"prompt": name},
    )


class _Choice:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.completion_tokens = 0
        self._held: list[Any] = []

    def text(self, deltas: list[Delta]) -> bytes | None:
        self.completion_tokens += sum(delta.count for delta in deltas)
        self._held += extras_of(deltas, "logprobs")
        text = "".join(delta.text for delta in deltas)
        if not text and len(self._held) < MANY:
            return None
        return _event({"text_output": text, **self._told()})

    def finish(self) -> bytes:
        return _event({"text_output": "", **self._told(), **_end_of(self.stream)})

    def _told(self) -> dict[str, Any]:
        entries, self._held = self._held, []
        return {"logprobs": block_of(entries, chat=False)} if entries else {}


class GenerateAnswer:
    def __init__(self, job: Job, streams: Sequence[Stream]) -> None:
        self._job = job
        self.choices = [_Choice(stream) for stream in streams]
        self._whole = Whole(streams[0], chat=False)

    def opening(self) -> list[bytes]:
        return []

    def closing(self) -> list[bytes]:
        return [DONE]

    def failure(self, error: TridentError) -> list[bytes]:
        return [b"data: " + error_body(error) + b"\n\n", DONE]

    def collect(self, stream: Stream) -> None:
        self._whole.collect()

    def whole(self) -> bytes:
        whole, stream = self._whole, self.choices[0].stream
        whole.collect()
        text = "".join(delta.text for delta in whole.deltas)
        answer = {"model_name": self._job.model, "text_output": text, **whole.prompt()}
        if (block := whole.block()) is not None:
            answer["logprobs"] = block
        return orjson.dumps({**answer, **_end_of(stream)})

    def usage(self) -> dict[str, Any]:
        return usage_of([choice.stream for choice in self.choices], 1)


class RawGenerateEndpoint(GenerateEndpoint):
    def __init__(self, settings: ProxySettings, state: ProxyState) -> None:
        super().__init__(parse_generate, settings, state)

    def _answer(self, job: Job, streams: list[Stream]) -> GenerateAnswer:
        return GenerateAnswer(job, streams)


def _end_of(stream: Stream) -> dict[str, Any]:
    end = stream.end
    assert end is not None, "the answer has ended"
    return {"finish_reason": end.finish_reason, "usage": usage_of([stream], 1)}


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
