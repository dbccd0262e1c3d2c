"""Calls of one model to another, by Triton's business logic scripting (BLS).

After a call's last response the stub forgets its iterator in a thread of its own that does not
hold the interpreter's lock. Where nobody else holds the iterator, the responses are freed there: a
segmentation fault with Python 3.12's allocator (Triton 2.51, at every start), a race before it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

KEPT_SECONDS = 2.0
"""The stub forgets an iterator within milliseconds of its end."""


class Calls:
    """Runs calls, and holds each iterator until the stub has surely forgotten it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Any]] = deque()

    def run(self, request: Any) -> list[str]:
        """Waits for every response to `request`; returns the messages of those that are errors."""
        responses = request.exec(decoupled=True)
        errors = [str(r.error().message()) for r in responses if r.has_error()]
        now = time.monotonic()
        self._kept.append((now, responses))
        while self._kept[0][0] < now - KEPT_SECONDS:
            self._kept.popleft()
        return errors
