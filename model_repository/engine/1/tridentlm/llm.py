"""Offline use: `LLM("model").generate(prompts, params)`, on the server's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tridentlm import grammar
from tridentlm.config import EngineSettings
from tridentlm.core.plan import StepOutput
from tridentlm.core.policy import check_priority
from tridentlm.core.request import Request, SamplingParams
from tridentlm.engine import Engine, build_runner, load_grammars
from tridentlm.errors import InternalError, InvalidRequest
from tridentlm.hub import resolve_model
from tridentlm.protocol import TokenLogprob
from tridentlm.simulated import check_simulated
from tridentlm.streams import TextStream
from tridentlm.text import Tokenizer
from tridentlm.tokenlog import TokenLog, tell

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer. `token_ids` holds all that were generated, a stop token or string included.

    `logprobs` are of these, after those of an echoed prompt; None when they were not asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class LLM:
    """A model loaded into this process. Not thread-safe; `close()` or `with` frees the memory.

    `model` is a Hugging Face folder, a .gguf file or a Hub id; "" is the bundled default. The
    keywords are the fields of EngineSettings.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        """Raises ModelNotFound or InvalidRequest."""
        resolved = EngineSettings(model=model, **settings)
        self.tokenizer = Tokenizer.load(resolve_model(resolved))
        runner, self.name = build_runner(resolved)
        grammars = load_grammars(runner, resolved, self.tokenizer)
        self._engine = Engine.from_settings(runner, resolved, grammars)
        self._settings = resolved
        self._next_id = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model. The object is of no use afterwards."""
        self._engine.close()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completes every prompt (text, or token ids), in order; one text is a list of one.

        `params` are for all prompts, or one for each. Raises InvalidRequest, before anything is
        generated, when a prompt can never be served.
        """
        texts: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(texts)
        if len(params) != len(texts):
            raise InvalidRequest(f"{len(texts)} prompts and {len(params)} params.", param="params")
        requests = [self._request(*pair) for pair in zip(texts, params, strict=True)]
        streams = {
            request.id: self._stream(request, given)
            for request, given in zip(requests, params, strict=True)
        }
        try:
            for request in requests:
                self._engine.add(request)
            while self._engine.has_work:
                output = self._engine.step()
                if output is not None:
                    self._feed(streams, output)
        finally:
            self._engine.shut_down()
        return [completion(stream) for stream in streams.values()]

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = np.asarray(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise InvalidRequest("A prompt must be a text or a list of token ids.", param="prompt")
        self._engine.limits.check_ids(ids)  # before a large id is cut to 32 bits
        if params.grammar is not None:
            grammar.check(params.grammar)
        if self._settings.runner == "simulated":
            check_simulated(params)
        check_priority(self._settings.policy, params.priority)
        self._next_id += 1
        return Request.build(
            self._next_id,
            ids.astype(np.int32),
            params,
            self._engine.limits,
            self.tokenizer.eos_token_ids,
        )

    def _stream(self, request: Request, params: SamplingParams) -> TextStream:
        return TextStream(
            request.id,
            "",
            _Unwatched(),
            len(request.prompt),
            params,
            self.tokenizer.detokenizer(params.skip_special_tokens),
            arrived=0.0,
            keep_ids=True,
            echo=request.prompt.tolist() if params.echo else (),
            log=TokenLog.of(params, request.prompt, self.tokenizer.texts),
        )

    def _feed(self, streams: dict[int, TextStream], output: StepOutput) -> None:
        if output.errors:
            raise InternalError(next(iter(output.errors.values())))
        if output.logprobs is not None:
            tell(output.logprobs, lambda id: streams[id].log)
        rows = (array.tolist() for array in (output.ids, output.tokens, output.finish))
        for request_id, token, finish in zip(*rows, strict=True):
            stream = streams[request_id]
            if stream.end is None:
                stream.feed(token, finish)
                if stream.end is not None:
                    self._engine.abort(request_id)  # a stop string; the engine knows tokens only


class _Unwatched:
    """The outlet of a stream that is taken from once, at its end."""

    def mark(self, stream: TextStream) -> None:
        pass


def completion(stream: TextStream) -> Completion:
    text, _, token_ids = stream.take()
    assert stream.end is not None, "every request has ended"
    assert token_ids is not None, "the stream keeps its ids"
    while stream.log is not None and stream.log.owes:
        stream.log.build()
    told = stream.take_logprobs() or {}
    logprobs, of_prompt = (
        [TokenLogprob.unpack(entry) for entry in told[name]] if name in told else None
        for name in ("logprobs", "prompt_logprobs")
    )
    reason = stream.end["finish_reason"]
    return Completion(text, token_ids, reason, stream.prompt_tokens, logprobs, of_prompt)
