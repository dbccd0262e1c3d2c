"""A load client for streaming chat completions: n streams started at once, as little CPU as can be.

    python -m benchmarks.sse_load PORT STREAMS TOKENS     prints one JSON object

Raw sockets, no HTTP library: on a small machine the client competes with what it measures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

START_DELAY = 0.5


class Load:
    """Counts of one run: events, gaps between a stream's writes and first tokens, in seconds."""

    def __init__(self, port: int, tokens: int) -> None:
        self.port = port
        self.tokens = tokens
        self.gaps: list[float] = []
        self.first: list[float] = []
        self.counted = 0
        self.failures: list[str] = []

    async def stream(self, index: int, start: float) -> None:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": f"Stream number {index}: count on."}],
                "max_tokens": self.tokens,
                "seed": index,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        sent = time.perf_counter()
        writer.write(head.encode() + body)
        last = 0.0
        tail = b""
        while data := await reader.read(65536):
            now = time.perf_counter()
            if data.count(b'"content":"') > data.count(b'"content":""'):
                if last:
                    self.gaps.append(now - last)
                else:
                    self.first.append(now - sent)
                last = now
            tail = (tail + data)[-600:]
            if b"[DONE]" in tail:
                break
        writer.close()
        self._count(tail)

    def _count(self, tail: bytes) -> None:
        for line in tail.split(b"\n"):
            if line.startswith(b"data: {") and b'"completion_tokens":' in line:
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    self.counted += usage["completion_tokens"]
                    return
        self.failures.append(tail[-200:].decode(errors="replace"))


async def run(port: int, streams: int, tokens: int) -> dict[str, Any]:
    """Starts `streams` at once; rates count from the common start to the last end."""
    load = Load(port, tokens)
    start = time.perf_counter() + START_DELAY
    await asyncio.gather(*(load.stream(i, start) for i in range(streams)))
    seconds = time.perf_counter() - start
    gaps, first = np.array(load.gaps or [0.0]) * 1e3, np.array(load.first or [0.0]) * 1e3
    return {
        "streams": streams,
        "tokens": load.counted,
        "seconds": round(seconds, 4),
        "tok_s": round(load.counted / seconds, 1),
        "gap_p50_ms": round(float(np.percentile(gaps, 50)), 2),
        "gap_p99_ms": round(float(np.percentile(gaps, 99)), 2),
        "ttft_p50_ms": round(float(np.percentile(first, 50)), 1),
        "ttft_p99_ms": round(float(np.percentile(first, 99)), 1),
        "failures": load.failures[:3],
        "failed": len(load.failures),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(*map(int, sys.argv[1:4])))))
