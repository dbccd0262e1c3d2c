"""A client that reads one event a second among 127 at full speed.

    python -m benchmarks.slow_client [--tokens 3000] [--runs 2]

Streams to 127 clients alone, then beside the slow one, in turns. The slow one reads at its pace
while the others run and at full speed afterwards; its text must be that of the same request
unstreamed.
Memory is the proxy's resident size, looked at every 0.25 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import httpx
import psutil

from benchmarks.record import write
from benchmarks.transport import simulated
from tests.server.service import Service
from tests.server.slow import SlowReader
from tridentlm_client.load import run_load

FAST = 127
STEP_MS = 5.0
MIB = 1 << 20


async def watch(proxy: psutil.Process, samples: list[float]) -> None:
    while True:
        samples.append(round(proxy.memory_info().rss / MIB, 1))
        await asyncio.sleep(0.25)


async def one_run(service: Service, tokens: int, slow: SlowReader | None) -> dict[str, Any]:
    samples: list[float] = []
    watching = asyncio.create_task(watch(service.find("openai_proxy.cli", "proxy"), samples))
    reading = None if slow is None else asyncio.create_task(slow.run(service.url, body(tokens)))
    result = (await run_load(service.url, FAST, tokens)).to_dict()
    watching.cancel()
    if slow is not None and reading is not None:
        still = not reading.done()
        slow.hurry.set()
        await reading
        result["slow"] = await account(service, slow, tokens) | {"outlasted_the_others": still}
    if result.pop("failures"):
        raise SystemExit("a stream failed")
    quarter = max(len(samples) // 4, 1)
    result["proxy_rss_mb"] = {
        "first": samples[0],
        "after_a_quarter": samples[quarter],
        "last": samples[-1],
        "most": max(samples),
    }
    return result


def body(tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Slowly."}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "seed": 3}


async def account(service: Service, slow: SlowReader, tokens: int) -> dict[str, Any]:
    """What the slow reader got, compared with the same request answered whole."""
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{service.url}/v1/chat/completions", json=body(tokens))
    text = answer.json()["choices"][0]["message"]["content"]
    return {
        "events_read_slowly": slow.slow_events,
        "seconds_read_slowly": round(slow.seconds, 2),
        "events": slow.events,
        "tokens": slow.tokens,
        "text_is_complete": slow.done and slow.text == text and slow.tokens == tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--runs", type=int, default=2)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "slow_client", "step_ms": STEP_MS, "fast": FAST}
    result |= {"tokens": arguments.tokens, "alone": [], "beside_a_slow_one": []}
    with simulated(STEP_MS) as service:
        asyncio.run(run_load(service.url, FAST, 200))
        for _ in range(arguments.runs):
            for name, slow in (("alone", None), ("beside_a_slow_one", SlowReader())):
                result[name].append(asyncio.run(one_run(service, arguments.tokens, slow)))
                print(name, json.dumps(result[name][-1]), flush=True)
    print(write("slow_client", result))


if __name__ == "__main__":
    main()
