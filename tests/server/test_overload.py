"""More than fits, over HTTP: who is refused, how, and who goes first."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from benchmarks.burst import ANSWER, burst
from tests.server.service import Service
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.server

PLACES, RUNNING = 16, 4
FOREVER = 8000  # tokens: 40 s


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """16 places, four of which run; a session has 12 of them, a user four."""
    flags = {
        "runner": "simulated",
        "max-running": str(RUNNING),
        "max-queue": str(PLACES - RUNNING),
        "session-share": "0.75",
        "user-share": "0.25",
        "max-queued-tokens": "1200",
        "policy": "priority",
    }
    pairs = [part for name, value in flags.items() for part in (f"--{name}", value)]
    with Service(tmp_path_factory.mktemp("limited"), *pairs) as service:
        yield service


@pytest.fixture(autouse=True)
def nobody_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("limited", "simulated"):
        if name in request.fixturenames:
            wait_until(request.getfixturevalue(name).idle, PATIENCE, "idle")


def body(**fields: Any) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": FOREVER}
    return {**chat, "stream": True, **fields}


@contextmanager
def running(service: Service, *bodies: dict[str, Any]) -> Iterator[list[httpx.Response]]:
    """Streams that have their 200, or are known to have been admitted, until the end."""
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=PATIENCE))
        url = f"{service.url}/v1/chat/completions"
        yield [stack.enter_context(client.stream("POST", url, json=each)) for each in bodies]


class Waiter(threading.Thread):
    """A request that waits for its answer; `served` is when it came."""

    def __init__(self, service: Service, **fields: Any) -> None:
        super().__init__()
        self.service, self.fields = service, fields
        self.served = 0.0
        self.status = 0
        self.start()

    def run(self) -> None:
        answer = self.service.chat(**self.fields)
        self.served, self.status = time.monotonic(), answer.status_code


def refusal(response: httpx.Response) -> str:
    """The message of a 503 that a client knows what to do with."""
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("overloaded_error", "overloaded")
    return str(error["message"])


def waiting(service: Service) -> int:
    return int(service.status()["waiting"])


def test_a_user_with_their_share_is_refused_and_another_is_served(limited: Service) -> None:
    with running(limited, *(body(user="greedy") for _ in range(RUNNING - 1))):
        third = Waiter(limited, user="modest")
        third.join(PATIENCE)
        assert third.status == 200
        with running(limited, body(user="greedy")):
            assert "user has their share of requests: 4" in refusal(limited.chat(user="greedy"))
            assert limited.status()["running"] == RUNNING, "refused at once"
            # Without a name it is the session's request, which has places left.
            unnamed = Waiter(limited, max_tokens=1)
            wait_until(lambda: waiting(limited) == 1, PATIENCE, "it waits")
    unnamed.join(PATIENCE)
    assert unnamed.status == 200


def test_a_session_with_its_share_is_refused_and_a_plain_client_is_not(limited: Service) -> None:
    with running(limited, *(body() for _ in range(RUNNING))):
        queued = [Waiter(limited, max_tokens=1, user=f"user {i}") for i in range(8)]
        wait_until(lambda: waiting(limited) == 8, PATIENCE, "the queue")
        assert "session has its share of requests: 12" in refusal(limited.chat(user="new"))
        plain = {"text_input": "Hi", "max_tokens": 1, "timeout": 0.5, "stream": False}
        answer = httpx.post(
            f"{limited.triton_url}/v2/models/generate/generate", json=plain, timeout=PATIENCE
        )
        assert answer.json()["finish_reason"] == "abort", "it waited for its timeout"
    for waiter in queued:
        waiter.join(PATIENCE)
        assert waiter.status == 200


def test_too_many_prompt_tokens_in_the_queue_are_refused(limited: Service) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 500}], "max_tokens": 1}
    with running(limited, *(body() for _ in range(RUNNING))):
        queued = [Waiter(limited, **long, user=f"user {i}") for i in range(3)]
        wait_until(lambda: waiting(limited) == 3, PATIENCE, "the queue")
        message = refusal(limited.chat())
        assert "prompt tokens wait" in message
        assert int(message.split()[4]) >= 1200
    for waiter in queued:
        waiter.join(PATIENCE)
        assert waiter.status == 200


def test_a_lower_priority_is_served_first(limited: Service) -> None:
    with running(limited, *(body() for _ in range(RUNNING))):
        late = Waiter(limited, max_tokens=400, priority=5)
        wait_until(lambda: waiting(limited) == 1, PATIENCE, "the first")
        more = [Waiter(limited, max_tokens=400, priority=5) for _ in range(RUNNING)]
        wait_until(lambda: waiting(limited) == 1 + RUNNING, PATIENCE, "the others")
        early = Waiter(limited, max_tokens=1, priority=-1)
        wait_until(lambda: waiting(limited) == 2 + RUNNING, PATIENCE, "the favoured")
    for waiter in (late, early, *more):
        waiter.join(PATIENCE)
    assert early.served < min(waiter.served for waiter in (late, *more))
    assert {waiter.status for waiter in (late, early, *more)} == {200}


def test_a_priority_that_the_policy_ignores_is_refused(simulated: Service) -> None:
    assert simulated.status()["policy"] == "fcfs"
    refused = simulated.chat(priority=1)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == "priority"
    assert "--policy priority" in error["message"]
    assert simulated.chat(priority=0).status_code == 200


def test_in_a_burst_each_request_gets_its_whole_answer_or_a_503(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Pages for 20, places for 100, 400 requests; benchmarks/overload.py has more of them."""
    flags = ("--runner", "simulated", "--num-pages", "140")
    places = ("--max-running", "64", "--max-queue", "36")
    with Service(tmp_path_factory.mktemp("burst"), *flags, *places) as service:
        outcomes = asyncio.run(burst(service.port, 400))
        wait_until(service.idle, PATIENCE, "idle")
    kinds = Counter((o.status, o.code, o.retry_after, o.tokens) for o in outcomes)
    assert kinds.keys() == {(200, None, None, ANSWER), (503, "overloaded", "1", 0)}
    served = kinds[(200, None, None, ANSWER)]
    assert 100 <= served < 400
    last = max(o.seconds for o in outcomes)
    assert max(o.seconds for o in outcomes if o.status == 503) < last
