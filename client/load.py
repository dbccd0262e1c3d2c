"""A load generator for streaming completions: n streams started at once.

Raw sockets and no HTTP library: on a small machine the generator competes with what it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tridentlm.errors import InvalidRequest

START_DELAY = 0.1
TAIL_BYTES = 800


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run. Rates count from the common start to the last stream's end; gaps are the times
    between a stream's writes that carry text; `failures` are the last bytes of failed streams."""

    streams: int
    tokens: int
    seconds: float
    tok_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    failures: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Run:
    host: str
    port: int
    head: str
    mark: bytes
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    failures: list[str] = field(default_factory=list)

    async def stream(self, body: bytes, start: float) -> None:
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        sent = time.perf_counter()
        tail = b""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(self.head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            tail = await self._read(reader, sent)
            writer.close()
        except OSError as error:
            tail = str(error).encode()
        self._count(tail)

    async def _read(self, reader: asyncio.StreamReader, sent: float) -> bytes:
        last, tail = 0.0, b""
        while data := await reader.read(65536):
            now = time.perf_counter()
            if data.count(self.mark) > data.count(self.mark + b'"'):
                if last:
                    self.gaps.append(now - last)
                else:
                    self.first.append(now - sent)
                last = now
            tail = (tail + data)[-TAIL_BYTES:]
            if b"data: [DONE]" in tail:
                break
        return tail

    def _count(self, tail: bytes) -> None:
        for line in reversed(tail.split(b"\n")):
            if line.startswith(b"data: {") and b'"completion_tokens":' in line:
                self.tokens += json.loads(line[6:])["usage"]["completion_tokens"]
                return
        self.failures.append(tail[-200:].decode(errors="replace"))


async def run_load(
    url: str,
    streams: int,
    max_tokens: int,
    *,
    prompt: str = "Count on.",
    model: str = "",
    api_key: str = "",
) -> LoadResult:
    """Streams `max_tokens` tokens to each of `streams` clients of the server at `url`.

    `model` is needed where the server has several.
    """
    bodies = [_chat(f"Stream number {i}. {prompt}", max_tokens, i) for i in range(streams)]
    if model:
        bodies = [{**body, "model": model} for body in bodies]
    return await load_with(url, bodies, api_key=api_key)


async def load_with(
    url: str, bodies: Sequence[Mapping[str, Any]], *, chat: bool = True, api_key: str = ""
) -> LoadResult:
    """Sends each body at the same moment, to chat or else text completions, as a stream.

    Raises InvalidRequest for another url than http://HOST[:PORT][/PATH].
    """
    where, host, port = _split(url)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = (
        f"POST {where.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {where.netloc}\r\n"
        "connection: close\r\ncontent-type: application/json\r\n"
    )
    if api_key:
        head += f"authorization: Bearer {api_key}\r\n"
    mark = b'"content":"' if chat else b'"text":"'
    run = _Run(host, port, head, mark)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    packed = [json.dumps({**options, **body}).encode() for body in bodies]
    start = time.perf_counter() + START_DELAY
    await asyncio.gather(*(run.stream(body, start) for body in packed))
    seconds = time.perf_counter() - start
    return LoadResult(
        streams=len(bodies),
        tokens=run.tokens,
        seconds=round(seconds, 4),
        tok_s=round(run.tokens / seconds, 1),
        gap_p50_ms=_percentile(run.gaps, 50),
        gap_p99_ms=_percentile(run.gaps, 99),
        ttft_p50_ms=_percentile(run.first, 50),
        ttft_p99_ms=_percentile(run.first, 99),
        failures=run.failures,
    )


def _split(url: str) -> tuple[SplitResult, str, int]:
    try:
        where = urlsplit(url)
        host, port = where.hostname, where.port or 80
    except ValueError:
        where, host, port = urlsplit(""), None, 0
    if where.scheme != "http" or not host:
        raise InvalidRequest(f"The url must be http://HOST:PORT, got {url!r}.", param="url")
    return where, host, port


def _chat(prompt: str, max_tokens: int, seed: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
    }


def _percentile(seconds: list[float], percent: int) -> float:
    """In ms; 0 for no values."""
    if not seconds:
        return 0.0
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e3, 2)
