"""2,000 requests at one moment to a service with pages for 20: who gets what, when, and memory.

    python -m benchmarks.burst

Steps take 5 ms, whatever they hold. Each request must get its whole answer or a 503 at once, and
memory must not grow from burst to burst. Raw sockets, as in the load generator: the client shares
the machine with what it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.record import write
from tests.server.service import Service, wait_until

REQUESTS, BURSTS = 2000, 3
ANSWER = 64
PAGES = 20 * 7  # of 16 tokens: a prompt of about 40 and an answer of 64
PATIENCE_S = 180.0


class Outcome(NamedTuple):
    """`seconds` from the start of the burst to the whole response; `tokens` of a 200."""

    status: int
    code: str | None
    retry_after: str | None
    tokens: int
    seconds: float


async def ask(port: int, number: int, start: float) -> Outcome:
    content = f"This is request number {number} of a burst. Go on counting from there."
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": ANSWER,
        "ignore_eos": True,
    }
    packed = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(packed)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + packed)
    answer = await reader.read()
    seconds = time.perf_counter() - start
    writer.close()
    lines, _, text = answer.partition(b"\r\n\r\n")
    first, *rest = lines.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in rest)
    found = json.loads(text)
    return Outcome(
        status=int(first.split()[1]),
        code=found["error"]["code"] if "error" in found else None,
        retry_after=headers.get("retry-after"),
        tokens=found.get("usage", {}).get("completion_tokens", 0),
        seconds=seconds,
    )


async def burst(port: int, requests: int = REQUESTS) -> list[Outcome]:
    start = time.perf_counter()
    asked = (ask(port, number, start) for number in range(requests))
    return await asyncio.wait_for(asyncio.gather(*asked), PATIENCE_S)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    served = [o.seconds for o in outcomes if o.status == 200]
    refused = [o.seconds for o in outcomes if o.status == 503]
    kinds = Counter(f"{o.status} {o.code or ''}".strip() for o in outcomes)
    return {
        "outcomes": dict(kinds),
        "whole_answers": sum(o.tokens == ANSWER for o in outcomes),
        "retry_after": sorted({o.retry_after for o in outcomes if o.retry_after}),
        "refused_s": _spread(refused),
        "served_s": _spread(served),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    p50, p99, most = np.percentile(seconds, [50, 99, 100]).tolist() if seconds else (0, 0, 0)
    return {"p50": round(p50, 3), "p99": round(p99, 3), "max": round(most, 3)}


def memory_mb(service: Service) -> dict[str, float]:
    """Resident memory of who carries a request."""
    processes = {
        "proxy": service.find("openai_proxy.cli", "proxy"),
        "engine stub": service.engine_stub(),
        "engine process": service.engine_process(),
    }
    return {name: round(p.memory_info().rss / 2**20, 1) for name, p in processes.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    flags = ("--runner", "simulated", "--num-pages", str(PAGES))
    rows = []
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), *flags) as service:
        for _ in range(BURSTS):
            row = summary(asyncio.run(burst(service.port)))
            wait_until(service.idle, 10, "idle")
            rows.append({**row, "rss_mb": memory_mb(service)})
            print(json.dumps(rows[-1]), flush=True)
        preemptions = service.status()["preemptions"]
    result = {"benchmark": "burst", "requests": REQUESTS, "pages": PAGES, "bursts": rows}
    print(write("burst", {**result, "preemptions": preemptions}))


if __name__ == "__main__":
    main()
