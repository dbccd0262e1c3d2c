"""Who is admitted next: a policy puts the waiting requests in order.

The scheduler admits in that order and stops at the first that does not fit, so nobody is overtaken
for being large; `queue.PATIENCE` bounds what a policy can do to anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from tridentlm.core.plan import I32
from tridentlm.core.request import Request
from tridentlm.errors import InvalidRequest


@dataclass(slots=True, eq=False)
class Entry:
    """A waiting request. `tokens` is its prompt and, after a preemption, what it has generated.

    `arrival` numbers requests as they came; `seen` is the count of admissions at that time.
    `cached` is the number of prompt tokens that its first admission found cached; None before.
    """

    request: Request
    tokens: I32
    arrival: int
    seen: int
    cached: int | None = None


PrefixLength = Callable[[Entry], int]
"""How many tokens of an entry the prefix cache holds now."""

Policy = Callable[[Collection[Entry], PrefixLength], Iterable[Entry]]
"""Takes the waiting requests in order of arrival."""

MATCHED = 128
"""Requests that longest-prefix looks up each time; those behind them keep their order."""


def fcfs(waiting: Collection[Entry], prefix_length: PrefixLength) -> Iterable[Entry]:
    """First come, first served: nobody is overtaken, so nobody starves."""
    return waiting


def priority(waiting: Collection[Entry], prefix_length: PrefixLength) -> Iterable[Entry]:
    """The lowest `priority` value first, and in order of arrival among equals."""
    return sorted(waiting, key=lambda entry: entry.request.priority)


def longest_prefix(waiting: Collection[Entry], prefix_length: PrefixLength) -> Iterable[Entry]:
    """Who has the most tokens in the prefix cache first, before they are evicted."""
    entries = iter(waiting)
    first = sorted(islice(entries, MATCHED), key=lambda entry: -prefix_length(entry))
    return [*first, *entries]


def check_priority(policy: str, value: int) -> None:
    """Raises InvalidRequest for a request's priority that the policy of that name ignores."""
    if value and policy != "priority":
        raise InvalidRequest(
            f"This server admits by {policy} and does not look at priority; start it with "
            "--policy priority.",
            param="priority",
            code="unsupported_parameter",
        )


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "priority": priority,
    "longest-prefix": longest_prefix,
}
