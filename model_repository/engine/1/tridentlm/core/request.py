"""What a request asks for, and what may be asked: `SamplingParams`, `Request`, `Limits`."""

from __future__ import annotations

import enum
import math
import secrets
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tridentlm.core.extras import RequestExtras
from tridentlm.core.params import SamplingParams as SamplingParams
from tridentlm.errors import ContextLengthExceeded, InvalidRequest, Overloaded


class FinishReason(enum.IntEnum):
    """Why a request ended. NONE: it has not. The numbers are the wire's, from engine to stub."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    @property
    def text(self) -> str:
        """OpenAI's spelling; empty while the request runs."""
        return "" if self is FinishReason.NONE else self.name.lower()


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted request as the scheduler knows it.

    `id` is unique for the life of the engine process. `prompt` is int32[n], n >= 1. `max_tokens` is
    resolved by `Limits.resolve`. `seed` is in [0, 2**64). `stop_token_ids` is the full set that
    ends the request: EOS ids (unless ignored) and the request's own. `deadline` is a
    time.monotonic() value in seconds, or inf. `client` is who shares the slots fairly with others.
    """

    id: int
    prompt: npt.NDArray[np.int32]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    deadline: float = math.inf
    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    extras: RequestExtras | None = None

    @classmethod
    def build(
        cls,
        id: int,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        limits: Limits,
        eos_token_ids: frozenset[int],
        client: str = "",
    ) -> Request:
        """The request that `params` describe, arriving now.

        Raises InvalidRequest (or ContextLengthExceeded) if it can never be served.
        """
        limits.check_ids(prompt)
        # A step is needed to have the prompt's logits; its token is nobody's when none is wanted.
        wanted = 1 if params.max_tokens == 0 else params.max_tokens
        max_tokens = limits.resolve(len(prompt), wanted)
        _check_extras(params, max_tokens, limits.vocab_size)
        stops = frozenset(params.stop_token_ids)
        ignores_eos = params.ignore_eos and params.grammar is None
        return cls(
            id=id,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            stop_token_ids=stops if ignores_eos else stops | eos_token_ids,
            deadline=math.inf if params.timeout is None else time.monotonic() + params.timeout,
            priority=params.priority,
            cache_salt=params.cache_salt,
            client=f"user {params.user}" if params.user else client,
            extras=RequestExtras.of(params, max_tokens),
        )


def _check_extras(params: SamplingParams, max_tokens: int, vocab_size: int) -> None:
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must be at most {max_tokens}, what this request can have; "
            f"got {params.min_tokens}.",
            param="min_tokens",
        )
    for token, _ in params.logit_bias:
        if token >= vocab_size:
            raise InvalidRequest(
                f"logit_bias has the token id {token}; ids must be in [0, {vocab_size}).",
                param="logit_bias",
            )


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold. Entry (the stub) and admission (the scheduler) ask the same object.

    `max_model_len`: tokens of prompt and output together. `num_pages` pages of `page_size` tokens
    are the whole KV pool. `max_running` requests hold slots at once, `max_queue` more may wait.
    `max_step_tokens` is the budget of tokens computed in one step. `vocab_size` bounds token ids.
    """

    max_model_len: int
    num_pages: int
    page_size: int
    max_running: int
    max_queue: int
    max_step_tokens: int
    vocab_size: int

    @property
    def max_tokens_held(self) -> int:
        """Tokens that one request can ever hold."""
        return min(self.max_model_len, self.num_pages * self.page_size)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def resolve(self, prompt_len: int, max_tokens: int | None) -> int:
        """The request's `max_tokens`, if it can ever be served.

        Raises ContextLengthExceeded beyond the model's context, InvalidRequest for an empty prompt
        or for more tokens than the whole KV pool holds.
        """
        if prompt_len < 1:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if prompt_len >= self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens, and your "
                f"prompt has {prompt_len}: no room is left for output.",
                param="prompt",
            )
        total = prompt_len + (max_tokens or 1)
        if total > self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens, and you "
                f"asked for {total} ({prompt_len} in the prompt, {max_tokens} for the output).",
                param="max_tokens",
            )
        if total > self.max_tokens_held:
            raise InvalidRequest(
                f"The KV cache holds {self.max_tokens_held} tokens, and this request needs {total} "
                f"({prompt_len} in the prompt, {max_tokens or 1} for the output).",
                param="max_tokens" if max_tokens else "prompt",
                code="kv_cache_exceeded",
            )
        return max_tokens or self.max_tokens_held - prompt_len

    def check_queue(self, unfinished: int) -> None:
        """Raises Overloaded when `unfinished` requests already fill every slot and the queue."""
        if unfinished >= self.max_running + self.max_queue:
            raise Overloaded(
                f"The queue is full: {self.max_running} requests may run and {self.max_queue} wait."
            )

    def check_ids(self, ids: npt.NDArray[np.int32]) -> None:
        """Raises InvalidRequest for a token id outside the vocabulary."""
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            raise InvalidRequest(f"Token ids must be in [0, {self.vocab_size}).", param="prompt")
