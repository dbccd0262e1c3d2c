"""The values that cross from scheduler to runner and out: what to compute, what came of it.

scheduler.schedule() --StepPlan--> runner.launch() ... collect() --tokens--> scheduler.commit()
                                                                    |
                                                                    `--> StepOutput (to the stub)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tridentlm.core.extras import Logprobs, StepExtras

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

FROM_DEVICE = -1
"""A `token_ids` entry that stands for the slot's last sampled token, still on the device."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over B rows (sequences) and T tokens, decodes first, then prefill chunks.

    Row i computes tokens `query_starts[i]:query_starts[i + 1]` of the flat arrays. Its KV holds
    `context_lens[i]` tokens after the step, the new ones included, so causal attention aligns the
    queries to the end of the context.
    """

    step: int
    slots: I32  # [B]
    query_starts: I32  # [B + 1], query_starts[0] == 0, query_starts[B] == T
    context_lens: I32  # [B]
    block_tables: I32  # [B, most pages of a row]; entries past a row's pages are 0
    token_ids: I32  # [T]; FROM_DEVICE: the slot's last sampled token
    positions: I32  # [T]
    kv_slots: I64  # [T]; page * page_size + offset, where the token's K and V are stored
    sampled: I32  # [S] rows that sample, ascending; a row in mid-prompt does not
    temperature: F32  # [S]; 0: greedy
    top_k: I32  # [S]; 0: off
    top_p: F32  # [S]
    min_p: F32  # [S]
    seeds: npt.NDArray[np.uint64]  # [S]
    sample_positions: I64  # [S]; the sampled token's absolute position: counts its random number
    extras: StepExtras | None = None  # None: no row asks for any

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class StepOutput:
    """What one engine iteration tells the outside, as parallel arrays (one entry per request).

    `tokens` is -1 for an entry that only ends a request (abort, error, deadline); with STOP it is
    the stop token itself. `finish` holds FinishReason values. `cached` lists, for requests that
    sampled their first token in this step, (id, prompt tokens found in the prefix cache).
    `errors` has the message of each ERROR. `logprobs` are of sampled tokens and of prompts.
    """

    ids: I64
    tokens: I32
    finish: npt.NDArray[np.uint8]
    cached: list[tuple[int, int]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; from `steps` on, counts from the start. `running` is admitted and not finished.

    `free_pages` are all that no request holds; of these, `cached_pages` hold a reusable prefix.
    """

    running: int
    waiting: int
    free_slots: int
    free_pages: int
    cached_pages: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_hit_tokens: int
    preemptions: int = 0
    integrity_checks: int = 0
    integrity_failures: int = 0
