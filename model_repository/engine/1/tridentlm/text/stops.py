"""Stop strings: what may be sent on, what must wait, where the text ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopChecker:
    """Watches one request's text for its stop strings; text that may be part of one is held back.

    The match that completes first ends the text, so the result does not depend on how the text is
    cut into tokens, and nothing is generated past a stop string that is already there. Of several
    that complete with the same character, the longest wins: it starts earliest.

        stops "END", "\\n\\n"        push("a\\n")   -> "a"       held "\\n"
                                    push("E")     -> "\\n"      held "E"
                                    push("ND.")   -> ""        matched "END"

    An Aho-Corasick automaton (Aho and Corasick, 1975): the state is the longest suffix of the text
    that is a prefix of a stop string, so the state's depth is the length that must be held. Time is
    linear in the text.
    """

    __slots__ = ("_depth", "_fail", "_held", "_next", "_starts", "_state", "_stop", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: at least one string, none of them empty."""
        assert all(stops), "an empty stop string matches everywhere"
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._starts = frozenset(self._next[0])
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may now be sent on. After a match: "", whatever comes."""
        if not self._state and self._starts.isdisjoint(text):
            return text if self.matched is None else ""
        if self.matched is not None:
            return ""
        follow, fail, stop = self._next, self._fail, self._stop
        state = self._state
        for i, char in enumerate(text):
            while (target := follow[state].get(char)) is None and state:
                state = fail[state]
            state = target or 0
            found = stop[state]
            if found is not None:
                self.matched = found
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen[: len(seen) - len(found)]
        self._state = state
        seen = self._held + text
        cut = len(seen) - self._depth[state]
        self._held = seen[cut:]
        return seen[:cut]

    def flush(self) -> str:
        """What is still held, when the request ends for another reason. "" after a match."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
            state = self._next[state][char]
        self._stop[state] = stop

    def _link(self) -> None:
        """Failure links in breadth-first order: a link always points to a lesser depth."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self._next[state].items():
                queue.append(target)
                back = self._fail[state]
                while back and char not in self._next[back]:
                    back = self._fail[back]
                self._fail[target] = self._next[back].get(char, 0)
                if self._stop[target] is None:
                    self._stop[target] = self._stop[self._fail[target]]
