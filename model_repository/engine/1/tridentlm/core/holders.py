"""The requests that hold a slot, from admission until its memory can be used again.

enter --> running --preempt--> leaving ---> queued again  } when no launched step
             '------finish---> finished --> gone          } contains the slot
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tridentlm.core.admission import Admission
from tridentlm.core.kv import KVPages
from tridentlm.core.plan import I32, I64, StepPlan
from tridentlm.core.table import SlotTable


class SlotHolders:
    """By id: those that are not finished. `running`, int64[n]: the slots that a step may contain.

    A slot in neither is in a launched step, and given back when that has landed.
    """

    def __init__(self, table: SlotTable, kv: KVPages, admission: Admission) -> None:
        self.running: I64 = np.empty(0, np.int64)
        self.preemptions = 0
        self._slot_of: dict[int, int] = {}
        self._table = table
        self._kv = kv
        self._admission = admission

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slot_of

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._slot_of))

    def enter(self, slots: list[int]) -> None:
        """The requests that were given `slots` run from now on."""
        for slot in slots:
            self._slot_of[int(self._table.ids[slot])] = slot
        if slots:
            self.running = np.concatenate([self.running, np.array(slots, np.int64)])

    def preempt(self, slot: int) -> None:
        """Queues a running request again, once no launched step contains it."""
        self.preemptions += 1
        self._admission.expected.preempted()
        self.running = self.running[self.running != slot]
        self._table.leaving[slot] = True
        if not self._table.in_flight[slot]:
            self._requeue(slot)

    def end(self, request_id: int) -> None:
        """`finish` for a request that may hold a slot or not."""
        if request_id in self._slot_of:
            self.finish(np.array([self._slot_of[request_id]]))

    def finish(self, slots: I64 | I32) -> None:
        """No step will contain these slots again; those that no launched step contains retire."""
        table = self._table
        table.finished[slots] = True
        for request_id in table.ids[slots].tolist():
            del self._slot_of[request_id]
        self.running = self.running[~table.finished[self.running]]
        self._retire(slots)

    def retire_landed(self, slots: I32) -> None:
        """A launched step that contains `slots` has landed: takes it off their account.

        Who finished before retires, unless another launched step contains it.
        """
        self._table.in_flight[slots] -= 1
        self._retire(slots[self._table.finished[slots]])

    def requeue_landed(self, slots: I32) -> None:
        """Queues those preempted that waited for this step, after its tokens are in the table."""
        table = self._table
        left = slots[table.leaving[slots] & ~table.finished[slots]]
        for slot in left[table.in_flight[left] == 0].tolist():
            self._requeue(slot)

    def _requeue(self, slot: int) -> None:
        """Queues a preempted request with its tokens so far, all of which have come."""
        table = self._table
        entry = table.entries[slot]
        assert entry is not None
        assert table.known[slot] == table.length[slot]
        entry.tokens = table.tokens[slot, : table.known[slot]].copy()
        del self._slot_of[entry.request.id]
        self._release(slot)
        self._admission.enqueue(entry)

    def _retire(self, slots: I64 | I32) -> None:
        """Takes back slot and pages of finished requests that no launched step contains."""
        table = self._table
        for slot in slots[table.in_flight[slots] == 0].tolist():
            entry = table.entries[slot]
            assert entry is not None
            self._admission.expected.observe(float(table.known[slot] - table.prompt_len[slot]))
            self._admission.leave(entry)
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._kv.release(slot)
        self._table.release(slot)

    def check(self, launched: Iterable[StepPlan]) -> None:
        """Raises AssertionError unless slots, running requests and launched steps agree."""
        table = self._table
        rows = np.concatenate([np.empty(0, np.int32), *(plan.slots for plan in launched)])
        counts = np.bincount(rows, minlength=len(table.ids))
        assert np.array_equal(counts, table.in_flight), "in_flight counts differ from plans"
        leaving = np.flatnonzero(table.leaving & ~table.finished)
        slots = [*self.running.tolist(), *leaving.tolist()]
        assert sorted(slots) == sorted(self._slot_of.values()), "running requests and slots differ"
