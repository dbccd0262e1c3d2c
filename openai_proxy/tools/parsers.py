"""Tool calls in a model's text, as it streams: one small state machine for each format.

          text --opening mark--> call --its object's end--> after --closing mark, or not--> text
                                   |
                                   `-- no call after all: mark and text are given back as content

Text around calls is content, except whitespace next to a call. What comes out does not depend on
how the text was split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from openai_proxy.tools.pieces import Piece, held
from openai_proxy.tools.reader import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    TOLERATED_KEYS,
    CallReader,
)


def new_call_id() -> str:
    return "call_" + os.urandom(12).hex()


class ToolParser:
    """`names` are the functions of the request. `special_marks`: the marks are special tokens,
    which the server must not skip."""

    opening: str
    special_marks = False

    def __init__(self, names: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        self._names = frozenset(names)
        self._new_id = new_id
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._state: Callable[[], bool] = self._text
        self._space = ""
        self._after_call = self._said = False
        self._lead = ""
        self._reader: CallReader | None = None
        self._announced = False
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._buffer += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> list[Piece]:
        """What was held back, at the end of the text. The arguments of a cut call stay cut."""
        self._end()
        if self._space and not self._after_call:
            self._pieces.append(Piece("content", self._space))
        self._buffer = self._space = ""
        return self._take()

    def _end(self) -> None:
        if self._reader is not None and not self._announced:
            self._give_back(self._reader.raw + self._buffer)
        elif self._reader is None:
            self._say(self._buffer)

    def _take(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        return taken

    # A state takes from the buffer; false: it needs more text.

    def _text(self) -> bool:
        before, mark, rest = self._buffer.partition(self.opening)
        if mark:
            self._say(before)
            self._buffer, self._lead = rest, mark
            self._opened()
            return True
        kept = len(self._buffer) - held(self._buffer, self.opening)
        self._say(self._buffer[:kept])
        self._buffer = self._buffer[kept:]
        return False

    def _opened(self) -> None:
        """What follows the opening mark."""
        self._begin(CallReader())

    def _begin(self, reader: CallReader) -> None:
        self._reader, self._announced = reader, False
        self._state = self._call

    def _call(self) -> bool:
        reader = self._reader
        assert reader is not None, "in a call"
        taken = reader.push(self._buffer)
        self._buffer = self._buffer[taken:]
        if reader.started and not self._announced:
            assert reader.name is not None, "started"
            self._announce(reader.name, self._new_id())
        if self._announced:
            self._pass_on(reader.take_arguments())
        if not reader.over:
            return False
        self._reader = None
        if self._announced:
            self._state = self._after
        else:
            self._give_back(reader.raw)
            self._state = self._text
        return True

    def _after(self) -> bool:
        """Behind a call."""
        self._state = self._text
        return True

    def _announce(self, name: str, call_id: str) -> None:
        self._announced = self._after_call = True
        self._space = ""
        self._pieces.append(Piece("call", name, self.calls, call_id))
        self.calls += 1

    def _pass_on(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(Piece("arguments", arguments, self.calls - 1))

    def _say(self, text: str) -> None:
        """Content, but for whitespace before a call, or alone beside calls."""
        text = self._space + text
        if self._after_call and not self._said:
            text = text.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._after_call, self._said = False, True
            self._pieces.append(Piece("content", said))

    def _give_back(self, raw: str) -> None:
        self._say(self._lead + raw)
        self._lead = ""


class HermesParser(ToolParser):
    """Hermes, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

    opening = "<tool_call>"
    closing = "</tool_call>"

    def _after(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(self.closing):
            self._buffer = rest[len(self.closing) :]
        elif self.closing.startswith(rest):
            return False
        self._state = self._text
        return True

    def _end(self) -> None:
        if self._state != self._after:
            super()._end()


class LlamaParser(ToolParser):
    """Llama 3: the answer is {"name": ..., "parameters": {...}}, or several with `;` between, maybe
    after <|python_tag|>. Only an object that names one of the request's functions is a call."""

    opening = "<|python_tag|>"
    special_marks = True
    _KEYS = NAME_KEYS | ARGUMENT_KEYS | TOLERATED_KEYS

    def __init__(self, names: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(names, new_id)
        self._state = self._first

    def _first(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        self._state = self._text
        if rest[0] == "{":
            self._say(self._buffer[: -len(rest)])
            self._buffer = rest
            self._opened()
        return True

    def _opened(self) -> None:
        self._begin(CallReader(accept_name=self._names.__contains__, only_keys=self._KEYS))

    def _after(self) -> bool:
        rest = self._buffer.lstrip(" \t\r\n;")
        if not rest:
            return False
        self._state = self._text
        if rest[0] == "{":
            self._lead, self._buffer = self._buffer[: -len(rest)], rest
            self._opened()
        return True

    def _end(self) -> None:
        if self._state != self._after or self._buffer.strip():
            super()._end()
