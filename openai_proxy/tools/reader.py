"""JSON read a character at a time: the end of a value, and the envelope of a tool call.

{"name": "f", "arguments": {"city": "Paris"}}
  key  value    key          value, passed on as it comes
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

import orjson

NAME_KEYS = frozenset({"name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
TOLERATED_KEYS = frozenset({"type", "id"})


class ValueScanner:
    """Finds the end of one JSON value. Brackets are counted, not matched: models err."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, char: str) -> int:
        """0: the value goes on; 1: `char` ended it; -1: it ended before `char`."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return int(self._depth == 0)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                return -1
            self._depth -= 1
            return int(self._depth == 0)
        elif self._depth == 0 and (char == "," or char.isspace()):
            return -1
        return 0


class State(enum.Enum):
    OPEN = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    NEXT = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class CallReader:
    """One call's object. It has `started` once its name is known and its arguments begin.

    `accept_name` and `only_keys` tell a call from another object that happens to look like one.
    `raw` is everything taken, for a caller that has to give back what was no call.
    """

    def __init__(
        self,
        *,
        accept_name: Callable[[str], bool] = lambda name: True,
        only_keys: Collection[str] | None = None,
    ) -> None:
        self.state = State.OPEN
        self.raw = ""
        self.name: str | None = None
        self._accept_name = accept_name
        self._only_keys = only_keys
        self._scanner = ValueScanner()
        self._key = ""
        self._value: list[str] = []
        self._arguments: list[str] = []
        self._has_arguments = False
        self._streams = False

    @property
    def started(self) -> bool:
        return self.name is not None and self._has_arguments

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    def push(self, text: str) -> int:
        """Takes characters until the object ends or turns out wrong; returns how many."""
        taken = len(text)
        for place, char in enumerate(text):
            self._step(char)
            if self.state is State.DONE:
                taken = place + 1
                break
            if self.state is State.FAILED:
                taken = place
                break
        self.raw += text[:taken]
        return taken

    def take_arguments(self) -> str:
        """The arguments' JSON since the last call; nothing before the call has started."""
        if not self.started:
            return ""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def _step(self, char: str) -> None:
        if self.state is State.IN_VALUE or self.state is State.IN_KEY:
            self._scan(char)
        elif not char.isspace():
            self._structure(char)

    def _structure(self, char: str) -> None:
        state = self.state
        if state is State.OPEN and char == "{":
            self.state = State.KEY
        elif state is State.KEY and char == '"':
            self._begin(State.IN_KEY, char)
        elif state is State.COLON and char == ":":
            self.state = State.VALUE
        elif state is State.NEXT and char == ",":
            self.state = State.KEY
        elif state in (State.KEY, State.NEXT) and char == "}":
            self._close()
        elif state is State.VALUE and (char in '"{[-' or char.isalnum()):
            nested = self._key in ARGUMENT_KEYS and char in "{["
            self._streams = nested and not self._has_arguments
            if self._streams:
                self._has_arguments = True
            self._begin(State.IN_VALUE, char)
        else:
            self.state = State.FAILED

    def _begin(self, state: State, char: str) -> None:
        self.state = state
        self._scanner = ValueScanner()
        self._value = []
        self._scan(char)

    def _scan(self, char: str) -> None:
        end = self._scanner.take(char)
        if end >= 0:
            (self._arguments if self._streams else self._value).append(char)
        if end == 0:
            return
        if self.state is State.IN_KEY:
            self._end_key()
        else:
            self._end_value()
        if end < 0 and self.state is State.NEXT:
            self._step(char)

    def _end_key(self) -> None:
        key = _decoded("".join(self._value))
        self._key = key if isinstance(key, str) else ""
        known = self._only_keys is None or self.started or self._key in self._only_keys
        self.state = State.COLON if known else State.FAILED

    def _end_value(self) -> None:
        self.state = State.NEXT
        if self._streams:
            self._streams = False
            return
        text = "".join(self._value)
        if self._key in ARGUMENT_KEYS and not self._has_arguments:
            value = _decoded(text)
            self._has_arguments = True
            if value is not None:
                text = value if isinstance(value, str) else text
            self._arguments.append("{}" if value is None else text)
        elif self._key in NAME_KEYS and self.name is None:
            name = _decoded(text)
            if isinstance(name, str) and name and self._accept_name(name):
                self.name = name
            else:
                self.state = State.FAILED

    def _close(self) -> None:
        self.state = State.FAILED if self.name is None else State.DONE
        if self.name is not None and not self._has_arguments:
            self._has_arguments = True
            self._arguments.append("{}")


def _decoded(text: str) -> object:
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value
