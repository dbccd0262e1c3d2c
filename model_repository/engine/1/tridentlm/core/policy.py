"""Who is admitted next: a policy puts the waiting requests in order.

The scheduler admits in that order and stops at the first that does not fit, so a policy alone
decides whether somebody can be overtaken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from tridentlm.core.request import Request

Policy = Callable[[Collection[Request]], Iterable[Request]]
"""Takes the waiting requests in order of arrival."""


def fcfs(waiting: Collection[Request]) -> Iterable[Request]:
    """First come, first served: nobody is overtaken, so nobody starves."""
    return waiting
