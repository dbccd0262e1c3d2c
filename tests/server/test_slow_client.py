"""A client that hardly reads: the others keep their pace, and it gets all of its text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.service import Service
from tests.server.slow import SlowReader
from tests.waiting import PATIENCE
from tridentlm_client.load import LoadResult, run_load

pytestmark = pytest.mark.server
TOKENS = 1200
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Slowly."}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "seed": 3,
}


async def together(service: Service, slow: SlowReader) -> LoadResult:
    """A slow reader beside 15 fast ones, until it has caught up."""
    task = asyncio.create_task(slow.run(service.url, BODY))
    result = await run_load(service.url, 15, TOKENS)
    assert not task.done(), "it was meant to be slow"
    slow.hurry.set()
    await asyncio.wait_for(task, PATIENCE)
    return result


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(simulated: Service) -> None:
    slow = SlowReader()
    result = asyncio.run(together(simulated, slow))
    assert result.failures == []
    assert result.tokens == 15 * TOKENS
    assert 2 <= slow.slow_events <= slow.seconds + 2
    whole = simulated.chat(**BODY).json()
    assert slow.done
    assert slow.tokens == whole["usage"]["completion_tokens"] == TOKENS
    assert slow.text == whole["choices"][0]["message"]["content"]
    assert slow.events < TOKENS, "what waited was merged"
