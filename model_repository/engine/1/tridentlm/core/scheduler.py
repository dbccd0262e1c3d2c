"""The scheduler: requests in, step plans out, tokens in, outputs out. No I/O, no clock, no torch.

A request's life. All endings share one path, and the retire rule decides when memory is reused:

    add --> waiting --admission--> running --EOS, length, abort, deadline, error--> finished
               |                                                                       |
               `----------abort, deadline, error (it holds nothing)--> gone  <--retire-'
                                                     when no launched step contains it

Admission reserves all pages that prompt and max_tokens need, so a running request never lacks one.
Up to two steps may be in flight: `schedule()` for step k + 1 comes before `commit()` of step k, so
a sequence that step k ends by EOS is computed once more; what comes of it is dropped.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from tridentlm.core.cache import NullCache, PrefixCache
from tridentlm.core.pages import PagePool
from tridentlm.core.plan import FROM_DEVICE, I32, I64, EngineStats, StepOutput, StepPlan
from tridentlm.core.policy import Policy, fcfs
from tridentlm.core.request import FinishReason, Limits, Request
from tridentlm.core.table import NO_TOKEN, SlotTable
from tridentlm.errors import InvalidRequest


class Scheduler:
    def __init__(
        self, limits: Limits, *, cache: PrefixCache | None = None, policy: Policy = fcfs
    ) -> None:
        self.limits = limits
        self.cache: PrefixCache = cache or NullCache()
        self.pool = PagePool(limits.num_pages)
        self.table = SlotTable(limits)
        self._policy = policy
        self._waiting: dict[int, Request] = {}
        self._waiting_deadline = math.inf  # no waiting request is overdue before
        self._slot_of: dict[int, int] = {}  # running requests
        self._running: I64 = np.empty(0, np.int64)  # their slots, in order of admission
        self._launched: deque[StepPlan] = deque()
        self._ended: dict[int, FinishReason] = {}  # terminal outputs not yet handed out
        self._errors: dict[int, str] = {}
        self._steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is unfinished, in flight or not yet reported."""
        return bool(self._waiting or self._slot_of or self._launched or self._ended)

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest if it can never be served, or if its id lives."""
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        self.limits.resolve(len(request.prompt), request.max_tokens)
        self.limits.check_ids(request.prompt)
        if request.id in self._waiting or request.id in self._slot_of or request.id < 0:
            raise InvalidRequest(f"Request id {request.id} is in use or negative.", param="id")
        self._waiting[request.id] = request
        self._waiting_deadline = min(self._waiting_deadline, request.deadline)

    def abort(self, request_id: int) -> None:
        """Ends a request in whatever state it is. An unknown or ended one is ignored."""
        if request_id in self._waiting or request_id in self._slot_of:
            self._end(request_id, FinishReason.ABORT)

    def fail(self, request_id: int, message: str) -> None:
        """Ends a request with an error, also one that `add` refused."""
        self._end(request_id, FinishReason.ERROR)
        self._errors[request_id] = message

    def fail_all(self, message: str) -> None:
        for request_id in [*self._waiting, *self._slot_of]:
            self.fail(request_id, message)

    def abort_all(self) -> None:
        for request_id in [*self._waiting, *self._slot_of]:
            self.abort(request_id)

    def expire(self, now: float) -> None:
        """Aborts every request whose deadline is not after `now`."""
        overdue = self._running[self.table.deadline[self._running] <= now]
        ids: list[int] = self.table.ids[overdue].tolist()
        if now >= self._waiting_deadline:
            ids += [r.id for r in self._waiting.values() if r.deadline <= now]
        for request_id in ids:
            self.abort(request_id)
        if now >= self._waiting_deadline:
            deadlines = (r.deadline for r in self._waiting.values())
            self._waiting_deadline = min(deadlines, default=math.inf)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute before a commit or an add."""
        pending = self._pending()
        budget = self.limits.max_step_tokens - int(pending.sum())
        if self._admit(budget):
            pending = self._pending()
        # Decodes first, so that a long prompt's chunks take only what the budget leaves.
        order = np.argsort(pending != 1, kind="stable")
        slots, pending = self._running[order], pending[order]
        room = self.limits.max_step_tokens - (np.cumsum(pending) - pending)
        take = np.minimum(pending, room)
        chosen = take > 0
        if not chosen.any():
            return None
        plan = self._plan(slots[chosen], take[chosen])
        self._launched.append(plan)
        self._steps += 1
        return plan

    def _pending(self) -> I64:
        """Tokens that each running slot could compute now: one to decode, more of a prompt."""
        table, running = self.table, self._running
        length = table.length[running]
        return np.where(length < table.final_len[running], length - table.computed[running], 0)

    def _admit(self, budget: int) -> int:
        """Moves waiting requests into slots while `budget` tokens remain; returns how many."""
        admitted: list[int] = []
        if self._waiting and budget > 0 and self.table.num_free:
            for request in self._policy(self._waiting.values()):
                if budget <= 0 or not self.table.num_free:
                    break
                slot = self._try_admit(request)
                if slot is None:
                    break
                admitted.append(slot)
                budget -= len(request.prompt) - int(self.table.cached[slot])
        for slot in admitted:
            request_id = int(self.table.ids[slot])
            del self._waiting[request_id]
            self._slot_of[request_id] = slot
        if admitted:
            self._running = np.concatenate([self._running, np.array(admitted, np.int64)])
        return len(admitted)

    def _try_admit(self, request: Request) -> int | None:
        """A slot with all pages the request will need, or None if the pool lacks them now."""
        prompt = request.prompt
        total = self.limits.pages_for(len(prompt) + request.max_tokens)
        match = self.cache.match_prefix(prompt[:-1])  # one token at least must be computed
        self.cache.lock(match.handle)  # a locked match no longer counts as evictable
        missing = total - len(match.pages)
        if missing > self.pool.num_free + self.cache.evictable:
            self.cache.unlock(match.handle)
            return None
        if missing > self.pool.num_free:
            self.pool.free(self.cache.evict_until(missing - self.pool.num_free))
        pages = np.concatenate([match.pages, self.pool.allocate(missing)])
        self._prompt_tokens += len(prompt)
        self._prefix_hit_tokens += match.length
        return self.table.admit(request, pages, match.length, match.handle)

    def _plan(self, slots: I64, take: I64) -> StepPlan:
        """The step that computes the next `take[i]` tokens of each of `slots`."""
        table, page_size = self.table, self.limits.page_size
        ends = np.cumsum(take)
        starts = ends - take
        first = table.computed[slots]
        context = first + take
        row = np.repeat(np.arange(len(slots)), take)
        positions = np.arange(ends[-1]) - (starts - first)[row]
        slot = slots[row]
        tokens = table.tokens[slot, positions]
        pages = table.block_table[slot, positions // page_size].astype(np.int64)
        width = self.limits.pages_for(int(context.max()))
        sampled = np.flatnonzero(context == table.length[slots])
        sampling = slots[sampled]
        table.in_flight[slots] += 1
        table.computed[slots] = context
        table.length[sampling] += 1
        return StepPlan(
            step=self._steps,
            slots=slots.astype(np.int32),
            query_starts=np.concatenate([starts, ends[-1:]]).astype(np.int32),
            context_lens=context.astype(np.int32),
            block_tables=table.block_table[slots, :width],
            token_ids=np.where(positions < table.known[slot], tokens, np.int32(FROM_DEVICE)),
            positions=positions.astype(np.int32),
            kv_slots=pages * page_size + positions % page_size,
            sampled=sampled.astype(np.int32),
            temperature=table.temperature[sampling],
            top_k=table.top_k[sampling],
            top_p=table.top_p[sampling],
            min_p=table.min_p[sampling],
            seeds=table.seeds[sampling],
            sample_positions=context[sampled],
        )

    def commit(self, plan: StepPlan, tokens: I32) -> StepOutput:
        """Takes the tokens of the oldest launched step, int32[S], and tells what came of them."""
        oldest = self._launched.popleft()
        assert plan is oldest, "steps are committed in the order of their launch"
        table = self.table
        table.in_flight[plan.slots] -= 1
        self._retire(plan.slots[table.finished[plan.slots]])
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
            cached=list(zip(table.ids[first].tolist(), table.cached[first].tolist(), strict=True)),
        )
        self._generation_tokens += len(slots)
        if finish.any():
            self._finish(slots[finish != 0])
        return self._with_ended(output)

    def drain(self) -> StepOutput | None:
        """Terminal outputs of requests that ended outside a step; None if there are none."""
        if not self._ended:
            return None
        return self._with_ended(
            StepOutput(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))
        )

    def _with_ended(self, output: StepOutput) -> StepOutput:
        if self._ended:
            count = len(self._ended)
            output.ids = np.append(output.ids, np.fromiter(self._ended, np.int64, count))
            output.tokens = np.append(output.tokens, np.full(count, NO_TOKEN, np.int32))
            reasons = np.fromiter(self._ended.values(), np.uint8, count)
            output.finish = np.append(output.finish, reasons)
            output.errors, self._ended, self._errors = self._errors, {}, {}
        return output

    def _end(self, request_id: int, reason: FinishReason) -> None:
        self._ended[request_id] = reason
        if self._waiting.pop(request_id, None) is None:
            slot = self._slot_of.get(request_id)
            if slot is not None:
                self._finish(np.array([slot]))

    def _finish(self, slots: I64 | I32) -> None:
        """No step will contain these slots again; those that no launched step contains retire."""
        table = self.table
        table.finished[slots] = True
        for request_id in table.ids[slots].tolist():
            del self._slot_of[request_id]
        self._running = self._running[~table.finished[self._running]]
        self._retire(slots)

    def _retire(self, slots: I64 | I32) -> None:
        """Takes back slot and pages of finished requests that no launched step contains."""
        table = self.table
        for slot in slots[table.in_flight[slots] == 0].tolist():
            # The KV of tokens whose value never came back cannot be looked up by value.
            valid = min(int(table.computed[slot]), int(table.known[slot]))
            ids, cached = table.tokens[slot, :valid], int(table.cached[slot])
            self.pool.free(self.cache.insert(ids, table.pages(slot), cached))
            self.cache.unlock(table.handles[slot])
            table.release(slot)

    def flush_cache(self) -> None:
        """Returns every cached page that no running request reads to the pool."""
        self.pool.free(self.cache.evict_until(self.cache.evictable))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._slot_of),
            waiting=len(self._waiting),
            free_slots=self.table.num_free,
            free_pages=self.pool.num_free,
            cached_pages=self.cache.evictable,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots, pages, cache and launched steps all agree."""
        owned = self.table.check()
        self.pool.check(np.concatenate([owned, self.cache.check()]))
        launched = [plan.slots for plan in self._launched]
        rows = np.concatenate([np.empty(0, np.int32), *launched])
        counts = np.bincount(rows, minlength=len(self.table.ids))
        assert np.array_equal(counts, self.table.in_flight), "in_flight counts differ from plans"
        running = self.table.ids[self._running].tolist()
        assert running == list(self._slot_of), "running requests and slots differ"
        assert not self._waiting.keys() & self._slot_of.keys()
