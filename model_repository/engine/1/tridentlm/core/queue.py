"""The waiting requests: in order of arrival, and in the order that a policy and fairness give."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

from tridentlm.core.policy import Entry, Policy, PrefixLength
from tridentlm.core.request import Request

PATIENCE = 1024
"""Admissions that a waiting request sees go by before it is first in line, whatever the policy."""


class WaitingQueue:
    def __init__(self, policy: Policy) -> None:
        self.patience = PATIENCE
        self._policy = policy
        self._entries: dict[int, Entry] = {}  # by request id, in order of arrival
        self._clients: Counter[str] = Counter()
        self._deadline = math.inf  # nobody is overdue before
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._entries))

    def add(self, request: Request, admissions: int) -> None:
        self._enter(Entry(request, request.prompt, self._arrivals, admissions))
        self._arrivals += 1

    def put_back(self, entry: Entry) -> None:
        """Takes a preempted request back in the place that its arrival gives it."""
        self._enter(entry)
        self._entries = dict(sorted(self._entries.items(), key=lambda item: item[1].arrival))

    def remove(self, request_id: int) -> bool:
        """Whether the request was waiting."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        client = entry.request.client
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]
        return True

    def overdue(self, now: float) -> list[int]:
        """The ids of all whose deadline is not after `now`."""
        if now < self._deadline:
            return []
        deadlines = {i: entry.request.deadline for i, entry in self._entries.items()}
        later = (deadline for deadline in deadlines.values() if deadline > now)
        self._deadline = min(later, default=math.inf)
        return [i for i, deadline in deadlines.items() if deadline <= now]

    def ordered(
        self, admissions: int, running: Mapping[str, int], prefix_length: PrefixLength
    ) -> Iterable[Entry]:
        """All entries, best first. `running`: slots that each client holds.

        Who has waited for PATIENCE admissions comes first; then clients take turns, the one with
        the fewest slots before the others, each with its own requests in the policy's order.
        """
        oldest = next(iter(self._entries.values()), None)
        if oldest is not None and admissions - oldest.seen >= self.patience:
            yield oldest
        order = self._policy(self._entries.values(), prefix_length)
        if len(self._clients) > 1:
            order = _take_turns(order, Counter(running))
        for entry in order:
            if entry is not oldest or admissions - entry.seen < self.patience:
                yield entry

    def _enter(self, entry: Entry) -> None:
        request = entry.request
        self._entries[request.id] = entry
        self._clients[request.client] += 1
        self._deadline = min(self._deadline, request.deadline)


def _take_turns(order: Iterable[Entry], slots: Counter[str]) -> Iterator[Entry]:
    """Merges the clients' queues: whoever holds the fewest slots, those given now included."""
    queues: dict[str, deque[Entry]] = {}
    for entry in order:
        queues.setdefault(entry.request.client, deque()).append(entry)
    while queues:
        client = min(queues, key=lambda name: slots[name])
        slots[client] += 1
        yield queues[client].popleft()
        if not queues[client]:
            del queues[client]
