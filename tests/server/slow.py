"""A client that reads one event a second, with buffers so small that the server notices."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

RECEIVE_BUFFER = 4096


@dataclass
class SlowReader:
    """Reads an event every `pace` seconds until `hurry` is set, then the rest at full speed.

    `slow_events` counts those read slowly, `seconds` is their time; `text` and `events` are of the
    whole stream, `tokens` what its usage says.
    """

    pace: float = 1.0
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    slow_events: int = 0
    events: int = 0
    seconds: float = 0.0
    text: str = ""
    tokens: int = 0
    done: bool = False

    async def run(self, url: str, body: dict[str, Any]) -> None:
        where = urlsplit(url)
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        link.setblocking(False)
        address = (where.hostname, where.port)
        await asyncio.get_running_loop().sock_connect(link, address)
        reader, writer = await asyncio.open_connection(sock=link, limit=RECEIVE_BUFFER)
        packed = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += f"content-length: {len(packed)}\r\n\r\n"
        writer.write(head.encode() + packed.encode())
        began = time.monotonic()
        while line := await _line(reader):
            if not line.startswith(b"data: "):
                continue  # heads, the ends of events and of HTTP's chunks, each one event
            self._take(line[6:].strip())
            if not self.hurry.is_set():
                self.slow_events += 1
                self.seconds = time.monotonic() - began
                await _wait(self.hurry, self.pace)
        writer.close()

    def _take(self, data: bytes) -> None:
        self.events += 1
        if data == b"[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        self.text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]


async def _wait(event: asyncio.Event, seconds: float) -> None:
    waiter = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiter], timeout=seconds)
    waiter.cancel()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """A line of any length: what the server merged for a lagging client exceeds the buffer."""
    parts = []
    while True:
        try:
            return b"".join([*parts, await reader.readuntil(b"\n")])
        except asyncio.LimitOverrunError as overrun:
            parts.append(await reader.readexactly(max(overrun.consumed, 1)))
        except asyncio.IncompleteReadError as end:
            return b"".join([*parts, end.partial])
