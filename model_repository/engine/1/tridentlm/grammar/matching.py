"""Where each running request stands in its grammar: what its next token may be.

    Engine.add -> begin(): compile, in a thread ... ready() -> scheduler
    schedule k -> allowed(): bits of the rows that sample -> launch k -> commit k -> advance()

A place moves by the tokens that are committed, so a preempted request's is where it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from tridentlm.core.extras import U32
from tridentlm.core.plan import StepOutput
from tridentlm.core.request import FinishReason, Request
from tridentlm.grammar.spec import LIMITS, refusal, source
from tridentlm.text import Tokenizer

COMPILERS = 2
KEPT = 64
"""Compiled grammars that are kept for requests to come."""


@dataclass(slots=True)
class Place:
    """`least`: tokens before which no stop token is drawn, unless nothing else is allowed."""

    matcher: LLMatcher
    least: int
    stops: U32  # [vocab / 32] bits
    taken: int = 0


class Grammars:
    """Single-threaded but for the compilers. Loading holds Python's lock for 0.1 to 1 s."""

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int, threads: int = 0
    ) -> None:
        """`threads` for masks; 0: the library's choice. Raises ValueError for a tokenizer that the
        compiler does not understand."""
        self._vocabulary = LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
        )
        self._specials = tokenizer.special_ids
        self._words = -(-vocab_size // 32)
        self._executor = LLExecutor(threads or None)
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiling: dict[int, tuple[Request, Future[LLMatcher]]] = {}
        self._places: dict[int, Place] = {}

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)

    @property
    def compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def begin(self, request: Request) -> None:
        """Compiles the request's grammar; `ready` tells when that is done."""
        assert request.extras is not None
        future: Future[LLMatcher]
        known = self._compiled.get(request.extras.grammar)
        if known is None:
            future = self._compilers.submit(self._compile, request.extras.grammar)
        else:
            future = Future()
            future.set_result(known)
        self._compiling[request.id] = request, future

    def withdraw(self, request_id: int) -> Request | None:
        """Takes back a request whose grammar is still being compiled."""
        found = self._compiling.pop(request_id, None)
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    def withdraw_all(self) -> list[Request]:
        return [request for i in [*self._compiling] if (request := self.withdraw(i))]

    def ready(self, timeout: float = 0.0) -> list[tuple[Request, str | None]]:
        """Requests that can go on, and those that cannot, with the reason."""
        if timeout:
            wait([future for _, future in self._compiling.values()], timeout)
        done = []
        for request, future in [*self._compiling.values()]:
            if future.done():
                del self._compiling[request.id]
                done.append((request, self._enter(request, future)))
        return done

    def allowed(self, ids: Sequence[int]) -> tuple[U32, dict[int, str]]:
        """What each request's next token may be, as bits [len(ids), vocab / 32].

        Also the requests that have failed, with the reason; their bits are all set.
        """
        bits = np.full((len(ids), self._words), -1, np.int32)
        places = [self._places[i] for i in ids]
        rows = [(place.matcher, row) for row, place in enumerate(places)]
        fill_next_token_bitmask_par(self._executor, rows, bits)
        masks: U32 = bits.view(np.uint32)
        failed = {}
        for request_id, place, mask in zip(ids, places, masks, strict=True):
            if place.matcher.is_error() or not mask.any():
                error = place.matcher.get_error() or "no token of the vocabulary fits"
                failed[request_id] = f"The grammar cannot be followed: {error}"
                mask[:] = ~np.uint32(0)
            elif place.taken < place.least and (mask & ~place.stops).any():
                mask &= ~place.stops
        return masks, failed

    def advance(self, output: StepOutput) -> None:
        """Moves the places of requests by what a step has told, and forgets those that ended."""
        if not self._places:
            return
        for entry in np.flatnonzero(np.isin(output.ids, list(self._places))).tolist():
            request_id = int(output.ids[entry])
            if output.finish[entry] != FinishReason.NONE:
                del self._places[request_id]
                continue
            place = self._places[request_id]
            place.matcher.consume_token(int(output.tokens[entry]))
            place.taken += 1

    def _compile(self, grammar: str) -> LLMatcher:
        """Raises InvalidRequest."""
        matcher = LLMatcher(
            self._vocabulary, source(grammar, self._specials), log_level=0, limits=LIMITS
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes a millisecond or two, and copies know it
        if matcher.is_error():
            raise refusal(matcher.get_error())
        return matcher

    def _enter(self, request: Request, future: Future[LLMatcher]) -> str | None:
        error = future.exception()
        if error is not None:
            return str(error)
        assert request.extras is not None
        matcher = future.result()
        self._keep(request.extras.grammar, matcher)
        stops = np.zeros(self._words * 32, np.uint8)
        stops[[i for i in request.stop_token_ids if i < len(stops)]] = 1
        packed = np.packbits(stops, bitorder="little").view(np.uint32)
        self._places[request.id] = Place(matcher.deep_copy(), request.extras.min_tokens, packed)
        return None

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        self._compiled[grammar] = matcher
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
