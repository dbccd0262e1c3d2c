"""The end of a service: what runs finishes, what comes is refused, nothing waits for a timeout."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.server.service import Service
from tests.server.test_disconnects import assert_stops_at_once, once_then_wait
from tests.server.test_faults import under_load
from tests.waiting import PATIENCE
from tridentlm.errors import TridentError
from tridentlm_client import Session, Submission
from tridentlm_client.wire import infer_request, is_final

pytestmark = pytest.mark.server
TOKENS = 2000  # ten seconds


def test_sigterm_lets_running_streams_finish_and_exits_with_0(fresh: Service) -> None:
    fresh.start()
    assert fresh.process is not None
    ends, seconds = under_load(fresh, fresh.process.terminate, max_tokens=800)
    assert set(ends) == {"done"}
    assert seconds > 1
    assert fresh.process.wait(PATIENCE) == 0


def test_a_session_on_a_stopping_tritonserver_gets_all_its_tokens_then_an_end(
    fresh: Service,
) -> None:
    """More frames than may be unacknowledged: a stopping server hears no acknowledgements."""
    fresh.start()

    async def run() -> tuple[int, str, TridentError]:
        async with Session(fresh.grpc) as session:
            (stream,) = await session.submit(
                [Submission(prompt="Hi", sampling={"max_tokens": TOKENS, "ignore_eos": True})]
            )
            assert not isinstance(stream, TridentError)
            count = sum(delta.count for delta in await stream.read())
            fresh.tritonserver().terminate()
            refused = await submit_until_refused(session)
            assert stream.end is None
            while deltas := await stream.read():
                count += sum(delta.count for delta in deltas)
            assert stream.end is not None
            return count, stream.end.finish_reason, refused

    count, reason, error = asyncio.run(run())
    assert (count, reason) == (TOKENS, "length")
    assert error.status == 503


async def submit_until_refused(session: Session) -> TridentError:
    """A server hears of its end a moment after its signal."""
    while True:
        (outcome,) = await session.submit([Submission(prompt="Hi", sampling={"max_tokens": 1})])
        if isinstance(outcome, TridentError):
            return outcome
        await asyncio.sleep(0.05)


def test_calls_cancelled_with_their_last_response_do_not_hold_up_the_end(fresh: Service) -> None:
    """Triton 2.51 counts such calls for ever, and would wait for its whole exit timeout."""
    fresh.start()
    request = infer_request("engine", strings={}, parameters={"max_tokens": 2})
    request.inputs.add(name="input_ids", datatype="INT32", shape=[3])
    request.raw_input_contents.append(b"\1\0\0\0" * 3)

    async def cancel_at_the_end(stub: Any) -> None:
        call = stub.ModelStreamInfer(once_then_wait(request))
        async for message in call:
            if is_final(message.infer_response):
                call.cancel()
                return

    async def run() -> None:
        async with grpc.aio.insecure_channel(fresh.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for _ in range(40):
                await asyncio.gather(*(cancel_at_the_end(stub) for _ in range(8)))

    asyncio.run(run())
    assert_stops_at_once(fresh)


def test_an_idle_plain_stream_does_not_hold_up_the_end(fresh: Service) -> None:
    fresh.start()
    assert fresh.process is not None
    url = f"{fresh.triton_url}/v2/models/generate/generate_stream"
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream(
            "POST", url, json={"text_input": "Hi", "max_tokens": 30}, timeout=PATIENCE
        ) as answer,
    ):
        list(answer.iter_lines())
    assert_stops_at_once(fresh)
