"""The scheduler: requests in, step plans out, tokens in, outputs out. No I/O, no clock, no torch.

A request's life. All endings share one path, and the retire rule decides when memory is reused:

    add --> waiting --admission--> running --EOS, length, abort, deadline, error--> finished
             | ^                      |                                                |
             | `---- preempted <------' when pages run out                             |
             `----------abort, deadline, error (it holds nothing)--> gone  <--retire---'
                                                     when no launched step contains it

Pages are given as a row grows. When none is left, the row with the weakest claim (the highest
priority value, then the youngest) gives up its own and is queued again with what it has generated;
its KV stays in the prefix cache while nobody needs the room. The row with the strongest claim is
never preempted, so somebody always comes to an end.

Up to two steps may be in flight: `schedule()` for step k + 1 comes before `commit()` of step k, so
a sequence that step k ends by EOS is computed once more; what comes of it is dropped.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tridentlm.core.admission import Admission
from tridentlm.core.cache import NullCache, PrefixCache
from tridentlm.core.endings import Endings, no_output
from tridentlm.core.expect import ExpectedLength
from tridentlm.core.extras import Logprobs
from tridentlm.core.holders import SlotHolders
from tridentlm.core.kv import KVPages
from tridentlm.core.plan import I32, I64, EngineStats, StepOutput, StepPlan
from tridentlm.core.planner import plan_step
from tridentlm.core.policy import Policy, fcfs
from tridentlm.core.queue import WaitingQueue
from tridentlm.core.request import FinishReason, Limits, Request
from tridentlm.core.table import SlotTable
from tridentlm.errors import InvalidRequest


class Scheduler:
    """`reserve`: admission sets aside all pages that max_tokens may need; nobody is preempted.

    `mixed_tokens`: prompt tokens computed in a step in which others decode, who wait for them; 0:
    as many as the step's budget leaves.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        cache: PrefixCache | None = None,
        policy: Policy = fcfs,
        reserve: bool = False,
        mixed_tokens: int = 0,
        expected: ExpectedLength | None = None,
    ) -> None:
        self.limits = limits
        self.table = SlotTable(limits)
        self.kv = KVPages(limits, self.table, cache or NullCache())
        self._mixed_tokens = mixed_tokens
        self._queue = WaitingQueue(policy)
        self._admission = Admission(
            limits, self.table, self.kv, self._queue, expected or ExpectedLength(), reserve=reserve
        )
        self._holders = SlotHolders(self.table, self.kv, self._admission)
        self._launched: deque[StepPlan] = deque()
        self._endings = Endings()
        self._steps = 0
        self._generation_tokens = 0
        self._checks = 0
        self._failures = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is unfinished, in flight or not yet reported."""
        return bool(len(self._queue) or self._holders or self._launched or self._endings)

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest if it can never be served, or if its id lives."""
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        self.limits.resolve(len(request.prompt), request.max_tokens)
        self.limits.check_ids(request.prompt)
        if request.id in self._queue or request.id in self._holders or request.id < 0:
            raise InvalidRequest(f"Request id {request.id} is in use or negative.", param="id")
        self._queue.add(request, self._admission.count)

    def abort(self, request_id: int) -> None:
        """Ends a request in whatever state it is. An unknown or ended one is ignored."""
        if request_id in self._queue or request_id in self._holders:
            self._end(request_id, FinishReason.ABORT)

    def fail(self, request_id: int, message: str) -> None:
        """Ends a request with an error, also one that `add` refused."""
        self._end(request_id, FinishReason.ERROR, message)

    def fail_all(self, message: str) -> None:
        for request_id in [*self._queue, *self._holders]:
            self.fail(request_id, message)

    def abort_all(self) -> None:
        for request_id in [*self._queue, *self._holders]:
            self.abort(request_id)

    def expire(self, now: float) -> None:
        """Aborts every request whose deadline is not after `now`."""
        overdue = self.table.ids[(self.table.deadline <= now) & ~self.table.finished]
        for request_id in [*overdue[overdue >= 0].tolist(), *self._queue.overdue(now)]:
            self.abort(request_id)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute before a commit or an add."""
        preemptions = self._holders.preemptions
        slots = self._with_pages()
        pending = self._pending(slots)
        # Newcomers would take the pages that somebody has just been preempted for.
        all_fit = len(slots) == len(self._holders.running)
        if all_fit and preemptions == self._holders.preemptions and self._admit(pending):
            slots = self._holders.running
            pending = self._pending(slots)
        # Decodes first, so that a long prompt's chunks take only what the budget leaves.
        order = np.argsort(pending != 1, kind="stable")
        slots, pending = slots[order], pending[order]
        room = self._budget(pending) - (np.cumsum(pending) - pending)
        take = np.minimum(pending, room)
        chosen = take > 0
        if not chosen.any():
            return None
        return self._launch(slots[chosen], take[chosen])

    def _launch(self, slots: I64, take: I64) -> StepPlan:
        """Plans the step. The prompts' pages that it fills can be shared from the next one on."""
        filling = slots[(take > 1) | (self.table.computed[slots] < self.table.prompt_len[slots])]
        plan = plan_step(self.table, slots, take, self._steps)
        self._launched.append(plan)
        self._steps += 1
        for slot in filling.tolist():
            self.kv.share(slot, plan.step)
        return plan

    def _pending(self, slots: I64) -> I64:
        """Tokens that each slot could compute now: one to decode, more of a prompt.

        What a grammar allows next is known only when the last token has come.
        """
        table = self.table
        length = table.length[slots]
        blind = table.has_extras[slots] & table.extras.constrained[slots]
        blind &= table.known[slots] < length
        can = ~blind & (length < table.final_len[slots])
        return np.where(can, length - table.computed[slots], 0)

    def _budget(self, pending: I64) -> int:
        """Tokens that the step may compute."""
        most, decodes = self.limits.max_step_tokens, int((pending == 1).sum())
        return min(most, decodes + self._mixed_tokens) if decodes and self._mixed_tokens else most

    def _with_pages(self) -> I64:
        """The running slots that have pages for what they could compute, after giving out pages.

        A row whose page could not be had waits for the next step.
        """
        table, running = self.table, self._holders.running
        end = table.computed[running] + self._pending(running)
        full = running[end > table.num_pages[running] * self.limits.page_size]
        if not len(full):
            return running
        if len(full) > self.kv.available:
            full = self._make_room(full)
        count = min(len(full), self.kv.available)
        self.kv.grow(full[:count])
        if count == len(full):
            return self._holders.running
        return self._holders.running[~np.isin(self._holders.running, full[count:])]

    def _make_room(self, full: I64) -> I64:
        """Preempts until each of `full` can have a page; returns those left, best claim first.

        A victim that a launched step contains gives its pages back a step later.
        """
        table, running = self.table, self._holders.running
        claims = running[np.lexsort((table.arrival[running], table.priority[running]))]
        full = claims[np.isin(claims, full)]
        while True:
            leaving = table.leaving
            promised = int((table.num_pages[leaving] - table.shared[leaving]).sum())
            room = self.kv.available + promised
            # The last in line waits rather than preempts itself: those before it may not need more.
            if len(full) <= room or full[room] == claims[-1]:
                return full
            victim, claims = claims[-1], claims[:-1]
            full = full[full != victim]
            self._holders.preempt(int(victim))

    def _admit(self, pending: I64) -> bool:
        """Whether somebody runs now who has waited."""
        if not len(self._queue):
            return False
        budget = self._budget(pending) - int(pending.sum())
        running = self._holders.running
        admitted = self._admission.admit(running, running[pending > 1], budget)
        self._holders.enter(admitted)
        return bool(admitted)

    def commit(self, plan: StepPlan, tokens: I32, logprobs: Logprobs | None = None) -> StepOutput:
        """Takes the tokens of the oldest launched step, int32[S], and tells what came of them."""
        oldest = self._launched.popleft()
        assert plan is oldest, "steps are committed in the order of their launch"
        table = self.table
        self.kv.settle(plan.step)
        self._holders.retire_landed(plan.slots)
        slots = plan.slots[plan.sampled]
        live = table.ids[slots] >= 0
        live &= ~table.finished[slots]
        slots, tokens = slots[live], tokens[live]
        known = table.known[slots]
        table.tokens[slots, known] = tokens
        table.known[slots] = known + 1
        stopped = (table.stop_ids[slots] == tokens[:, None]).any(axis=1)
        full = known + 1 >= table.final_len[slots]
        finish = np.where(full, FinishReason.LENGTH, FinishReason.NONE).astype(np.uint8)
        finish[stopped] = FinishReason.STOP
        first = slots[known == table.prompt_len[slots]]
        output = StepOutput(
            ids=table.ids[slots],
            tokens=tokens,
            finish=finish,
            cached=[
                (e.request.id, e.cached or 0) for i in first.tolist() if (e := table.entries[i])
            ],
            logprobs=logprobs and self._running_of(logprobs),
        )
        self._generation_tokens += len(slots)
        if finish.any():
            self._holders.finish(slots[finish != 0])
        self._holders.requeue_landed(plan.slots)
        return self._endings.add_to(output)

    def _running_of(self, logprobs: Logprobs) -> Logprobs | None:
        """Without those of requests that have ended."""
        keep = np.isin(logprobs.ids, list(self._holders))
        return logprobs.of(keep) if keep.any() else None

    def drain(self) -> StepOutput | None:
        """Terminal outputs of requests that ended outside a step; None if there are none."""
        return self._endings.add_to(no_output()) if self._endings else None

    def _end(self, request_id: int, reason: FinishReason, message: str | None = None) -> None:
        self._endings.note(request_id, reason, message)
        if not self._queue.remove(request_id):
            self._holders.end(request_id)

    def flush_cache(self) -> None:
        """Returns every cached page that no running request reads to the pool."""
        self.kv.flush()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._holders),
            waiting=len(self._queue),
            free_slots=self.table.num_free,
            free_pages=self.kv.available,
            cached_pages=self.kv.cache.evictable,
            steps=self._steps,
            prompt_tokens=self._admission.prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_hit_tokens=self._admission.prefix_hit_tokens,
            preemptions=self._holders.preemptions,
            integrity_checks=self._checks,
            integrity_failures=self._failures,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots, pages, cache and launched steps all agree."""
        self._checks += 1
        try:
            self._check_books()
        except AssertionError:
            self._failures += 1
            raise

    def _check_books(self) -> None:
        self.kv.check()
        self._holders.check(self._launched)
        assert not any(request_id in self._queue for request_id in self._holders)
