"""Mistral's tool calls: [TOOL_CALLS] and a list of objects, or a name and its arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection

from openai_proxy.tools.parsers import ToolParser
from openai_proxy.tools.reader import CallReader, ValueScanner

_MISTRAL_HEAD = re.compile(
    r"\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*(\w{1,64})\s*)?(?:\[ARGS\]\s*)?", re.ASCII
)
_MAX_HEAD = 256


class MistralParser(ToolParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and the newer [TOOL_CALLS]name{...} and
    [TOOL_CALLS]name[ARGS]{...}. Mistral's templates want ids of nine letters and digits."""

    opening = "[TOOL_CALLS]"
    special_marks = True

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str] = lambda: os.urandom(5).hex()[:9]
    ) -> None:
        super().__init__(names, new_id)
        self._scanner: ValueScanner | None = None
        self._in_array = False

    def _opened(self) -> None:
        self._in_array = False
        self._state = self._head

    def _head(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == "[":
            at = len(self._buffer) - len(rest) + 1
            self._lead += self._buffer[:at]
            self._buffer = self._buffer[at:]
            self._in_array = True
            self._state = self._element
            return True
        head, brace, _ = self._buffer.partition("{")
        if not brace and len(head) < _MAX_HEAD:
            return False
        match = _MISTRAL_HEAD.fullmatch(head) if len(head) < _MAX_HEAD else None
        if match is None:
            self._give_back("")
            self._state = self._text
            return True
        self._buffer = self._buffer[len(head) :]
        self._announce(match[1], match[2] or self._new_id())
        self._scanner = ValueScanner()
        self._state = self._arguments
        return True

    def _element(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        at = len(self._buffer) - len(rest)
        if rest[0] == "{":
            self._lead += self._buffer[:at]
            self._buffer = rest
            self._begin(CallReader())
            return True
        self._give_back(self._buffer[:at])
        self._buffer = rest
        self._state = self._text
        return True

    def _arguments(self) -> bool:
        scanner = self._scanner
        assert scanner is not None, "in arguments"
        for place, char in enumerate(self._buffer):
            if scanner.take(char):
                self._pass_on(self._buffer[: place + 1])
                self._buffer = self._buffer[place + 1 :]
                self._state = self._text
                return True
        self._pass_on(self._buffer)
        self._buffer = ""
        return False

    def _after(self) -> bool:
        self._state = self._text
        rest = self._buffer.lstrip()
        if not self._in_array:
            return True
        if not rest:
            self._state = self._after
            return False
        if rest[0] == ",":
            self._lead, self._buffer = ",", rest[1:]
            self._state = self._element
        elif rest[0] == "]":
            self._buffer = rest[1:]
        return True

    def _end(self) -> None:
        if self._state in (self._head, self._element):
            self._give_back(self._buffer)
        elif self._state not in (self._after, self._arguments):
            super()._end()
