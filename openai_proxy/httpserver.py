"""uvicorn's HTTP protocol with limits on how slow and how large a request's head may be.

    connection, or a request's first byte --HEAD_SECONDS--> head --BODY_SECONDS--> body
                                                |                      |
                                                `---- 408, closed -----'

uvicorn itself waits for ever for a head or body that does not come. Between requests its own
keep-alive timeout holds. What is no HTTP gets an error of the same shape as all others.

A client that offers to switch to HTTP/2 (Java's does, with its first request) is served in HTTP/1:
the parser stops at such an offer and would lose the body, so the head is read again without it.

An answer to HTTP/1.0 ends with its connection: uvicorn would send its stream in chunks, with their
lengths between the events, which such a client takes for text.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from openai_proxy.errors import HttpError, error_body

HEAD_SECONDS = 20.0
BODY_SECONDS = 300.0
MAX_HEAD_BYTES = 65536
_OFFER = (b"connection", b"upgrade", b"http2-settings")


class UntilClosed(int):
    """The number of bytes that an answer may still have when nobody has said how many it has."""

    def __lt__(self, size: int) -> bool:
        return False

    def __sub__(self, size: int) -> UntilClosed:
        return self


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._timer is None:
                self._expect(HEAD_SECONDS)
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "This is no valid HTTP request.")
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"The head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = False
        self._expect(BODY_SECONDS)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = UntilClosed()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._expect(None)
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def _decline(self, rest: bytes) -> None:
        """Reads the head again without the offer to switch protocols, and `rest` after it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(405, "This is no proxy for connections.")
            return
        head = [method, b" ", self.url, b" HTTP/1.1\r\n"]
        head += [b"%b: %b\r\n" % (n, v) for n, v in self.headers if n not in _OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def _expect(self, seconds: float | None) -> None:
        """Closes the connection unless called again within `seconds`."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        self._timer = None
        answered = not self._in_head and self.cycle.response_started
        if answered or (self._in_head and self._head_bytes == 0):
            self.transport.close()
        elif self._in_head:
            self._refuse(408, "The head of the request did not come in time.")
        else:
            self._refuse(408, "The body of the request did not come in time.")

    def _refuse(self, status: int, message: str) -> None:
        """Answers what has not become a request of the application, and closes."""
        if self.transport.is_closing():
            return
        phrase = HTTPStatus(status).phrase
        code = phrase.lower().replace(" ", "_")
        body = error_body(HttpError(status, message, code))
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
