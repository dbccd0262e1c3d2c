"""What crosses the process border arrives as it left."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.core.driver import make_limits
from tridentlm.channel import (
    Failed,
    Idle,
    Message,
    Ready,
    Step,
    pack_add,
    pack_message,
    split_add,
    unpack_message,
    unpack_request,
)
from tridentlm.core.extras import Logprobs, RequestExtras
from tridentlm.core.plan import EngineStats, StepOutput
from tridentlm.core.request import Request
from tridentlm.errors import ContextLengthExceeded, ModelNotFound

STATS = EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_requests_arrive_whole_with_the_time_that_is_left() -> None:
    sent = [
        Request(2**62, np.array([5, 6, 7], np.int32), 9, 0.5, 0.9, 40, 0.1, 2**64 - 1),
        Request(1, np.array([8], np.int32), 1, stop_token_ids=frozenset({3, 4}), deadline=110.0),
    ]
    heads = list(split_add(pack_add(sent, now=100.0)))
    got = [unpack_request(head, ids, now=1000.0) for head, ids in heads]
    for before, after in zip(sent, got, strict=True):
        assert after.prompt.dtype == np.int32
        assert after.prompt.tolist() == before.prompt.tolist()
        for name in ("id", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"):
            assert getattr(after, name) == getattr(before, name)
        assert after.stop_token_ids == before.stop_token_ids
    assert [request.deadline for request in got] == [math.inf, 1010.0]


def test_extras_arrive_equal_and_are_nothing_where_nobody_asks() -> None:
    bias = ((7, -100.0), (2**31 - 1, 0.25))
    extras = RequestExtras(1.5, -0.5, 1.1, bias, min_tokens=3, logprobs=0, prompt_logprobs=20)
    prompt = np.array([5], np.int32)
    sent = [Request(1, prompt, 9, extras=extras), Request(2, prompt, 9)]
    got = [unpack_request(*part, now=0.0) for part in split_add(pack_add(sent, now=0.0))]
    assert [request.extras for request in got] == [extras, None]


def test_log_probabilities_arrive_with_their_step() -> None:
    told = Logprobs(
        np.array([3, 3]),
        np.array([1, 2]),
        np.array([[5, 6, 7], [8, 9, 10]], np.int32),
        np.array([[-0.5, -0.25, -np.inf], [-1, -2, -3]], np.float32),
        np.array([2, 1], np.int32),
    )
    ids, tokens, finish = np.array([3]), np.array([17], np.int32), np.array([0], np.uint8)
    got = unpack_message(pack_message(Step(StepOutput(ids, tokens, finish, logprobs=told), STATS)))
    assert isinstance(got, Step)
    assert got.output.logprobs is not None
    for name in ("ids", "positions", "tokens", "values", "ranks"):
        before, after = getattr(told, name), getattr(got.output.logprobs, name)
        assert after.dtype == before.dtype
        assert after.tolist() == before.tolist()


@pytest.mark.parametrize(
    "message",
    [
        Ready(make_limits(), "tiny", "cpu", "float32", 1.5),
        Idle(STATS),
    ],
)
def test_values_arrive_equal(message: Message) -> None:
    assert unpack_message(pack_message(message)) == message


def test_step_arrives_with_arrays_and_dtypes() -> None:
    output = StepOutput(
        np.array([3, 2**40], np.int64),
        np.array([17, -1], np.int32),
        np.array([0, 4], np.uint8),
        cached=[(3, 16)],
        errors={2**40: "broken"},
    )
    got = unpack_message(pack_message(Step(output, STATS)))
    assert isinstance(got, Step)
    assert got.stats == STATS
    for name in ("ids", "tokens", "finish"):
        before, after = getattr(output, name), getattr(got.output, name)
        assert after.dtype == before.dtype
        assert after.tolist() == before.tolist()
    assert (got.output.cached, got.output.errors) == (output.cached, output.errors)


@pytest.mark.parametrize("error", [ModelNotFound("none here"), ContextLengthExceeded("too long")])
def test_failure_keeps_class_and_text(error: ModelNotFound | ContextLengthExceeded) -> None:
    got = unpack_message(pack_message(Failed(error)))
    assert isinstance(got, Failed)
    assert type(got.error) is type(error)
    assert got.error.payload() == error.payload()
