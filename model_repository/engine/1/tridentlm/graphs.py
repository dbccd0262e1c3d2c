"""Steps on a CUDA device: decodes as CUDA Graphs, prompts of few tokens by graphs of their parts,
everything else launched kernel by kernel.

A graph replays the kernels of one batch size at fixed addresses. So a step of B decodes takes the
graph of the next larger size and fills it up with rows that nobody owns: their page is the cache's
spare one, their slot the table's last.

    staging buffer  | token_ids | positions | kv_slots | slots | ... | pages |   one copy a step
    graph 8         [ ids -> embedding -> layers -> head -> sampled tokens ]
    B = 5             r0  r1  r2  r3  r4  pad pad pad
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tridentlm.adjust import LogitAdjuster
from tridentlm.backends.flashinfer import (
    FlashInferBackend,
    FlashInferStep,
    Prefill,
    cut_tail,
)
from tridentlm.backends.kernels import choose_tokens
from tridentlm.core.plan import StepPlan
from tridentlm.core.request import Limits
from tridentlm.eager import PendingTokens, output_rows
from tridentlm.logprobs import measure
from tridentlm.models.decoder import Decoder
from tridentlm.promptgraphs import PromptGraphs
from tridentlm.sampling import draws, has_filters, sample
from tridentlm.staging import Staging
from tridentlm.steparrays import decode_layout, idle_plan, mixed_layout, padded, page_list

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, FlashInferStep, torch.Tensor | None], torch.Tensor]
"""`Decoder.forward`."""
Result = TypeVar("Result")


def batch_sizes(largest: int) -> list[int]:
    """The sizes that get a graph: close together where a padding row costs most.

    Above 128 rows cuBLAS takes longer for most odd multiples of 8 than for the next of 16.
    """
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, largest + 1, 32)]
    return [size for size in sizes if size < largest] + [largest] if largest else []


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [size, vocab]
    tokens: torch.Tensor  # [size]


class CudaExecutor:
    """Computes step plans; see `eager.TorchExecutor` for how tokens pass from step to step.

    `graph_sizes`: ascending batch sizes to capture; `prompt_sizes`: those of `PromptGraphs`.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: FlashInferBackend,
        limits: Limits,
        graph_sizes: list[int],
        prompt_sizes: list[int],
    ) -> None:
        self._decoder, self._backend, self._device = decoder, backend, backend.device
        self._page_size = limits.page_size
        self._last_token = torch.zeros(
            limits.max_running + 1, dtype=torch.int32, device=self._device
        )
        self._spare_slot = limits.max_running
        self._adjuster = LogitAdjuster(self._device, limits)
        self._sizes = graph_sizes
        largest = max([1, *graph_sizes])
        self._decode_layout = decode_layout(largest, backend.decode_fields(largest))
        self._mixed_layout = mixed_layout(limits, backend.decode_fields(limits.max_running))
        words = max(
            max(field.offset + field.size for field in layout.values())
            for layout in (self._decode_layout, self._mixed_layout)
        )
        self._staging = Staging(words, self._device)
        self._prefill = Prefill(backend)
        self._prompts = PromptGraphs(decoder, prompt_sizes, backend.dtype, self._device)
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None

    def capture(self) -> None:
        """Captures the graphs, the largest first: the smaller ones fit into its memory."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size)
        self._prompts.capture(lambda part: self._record(part)[0])
        torch.cuda.synchronize(self._device)

    def launch(self, plan: StepPlan) -> PendingTokens:
        logits, tokens, hidden = self.compute(plan)
        if plan.extras is None or plan.extras.measured is None:
            return PendingTokens(plan, tokens)
        table = measure(plan, logits, tokens, hidden, self._decoder.logits)
        return PendingTokens(plan, tokens, table)

    def compute(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Starts the step. Returns logits [S, vocab], tokens int32 [S] and hidden [Q, hidden_size].

        The last is of the places measured in prompts. Logits and tokens may be a graph's own
        memory, which its next step overwrites.
        """
        lengths = np.diff(plan.query_starts)
        longer = np.flatnonzero(lengths != 1)
        decodes = int(longer[0]) if len(longer) else plan.num_rows
        if decodes == len(plan.sampled) == plan.num_rows <= max([0, *self._sizes]):
            logits, tokens = self._replay(plan)
            hidden = logits[:0]
        else:
            logits, tokens, hidden = self._run_mixed(plan, lengths, decodes)
        adjusts = self._adjuster.adjusts(plan)
        if len(tokens) and (adjusts or has_filters(plan)):
            asked = self._adjuster.adjust(logits, plan) if adjusts else logits
            tokens = sample(asked, plan, cut_tail).int()
            self._adjuster.count(tokens, plan)
            self._last_token[self._to_device(plan.slots[plan.sampled])] = tokens
        self._decoder.group.broadcast(self._last_token)
        return logits, tokens, hidden

    def _replay(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        rows = plan.num_rows
        size = self._sizes[bisect.bisect_left(self._sizes, rows)]
        graph = self._graphs[size]
        self._send_decodes(plan, size)
        graph.graph.replay()
        return graph.logits[:rows], graph.tokens[:rows]

    def _send_decodes(self, plan: StepPlan, size: int) -> None:
        """Fills the staging buffer for the graph of `size`."""
        spare = self._backend.spare_page
        context = padded(plan.context_lens, size, 1)
        tables = padded(plan.block_tables, size, spare)
        arrays: dict[str, npt.NDArray[Any]] = {
            "token_ids": padded(plan.token_ids, size, 0),
            "positions": padded(plan.positions, size, 0),
            "kv_slots": padded(plan.kv_slots.astype(np.int32), size, spare * self._page_size),
            "slots": padded(plan.slots, size, self._spare_slot),
            "context_lens": context,
            "temperature": padded(plan.temperature, size, 0),
            "uniform": padded(draws(plan), size, 0),
        }
        self._staging.send(
            self._decode_layout, arrays | self._backend.decode_arrays(tables, context)
        )

    def _capture(self, size: int) -> _Graph:
        layout = self._decode_layout
        fields = {name: self._staging.view(field) for name, field in layout.items()}
        decode = self._backend.decode(fields, size)
        rows = {name: x[:size] for name, x in fields.items()}
        step = FlashInferStep(
            self._backend, rows["positions"], rows["kv_slots"], decode, size, None
        )
        self._send_decodes(idle_plan(), size)
        forward = self._decoder.forward
        graph, (logits, tokens, _) = self._record(
            partial(self._compute, forward, rows, rows["slots"], step, None)
        )
        return _Graph(graph, logits, tokens)

    def _record(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A graph of what `compute` launches, and where its result will be."""
        compute()  # no library may set itself up in a capture
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # The thread that watches over NCCL may ask the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        self._pool = self._pool or graph.pool()
        return graph, result

    def _run_mixed(
        self, plan: StepPlan, lengths: npt.NDArray[Any], decodes: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layout, wanted = self._mixed_layout, output_rows(plan)
        if not len(wanted):
            wanted = np.zeros(1, np.int32)  # kernels take at least one row; nobody reads this one
        indptr, pages = page_list(
            plan.block_tables[decodes:], plan.context_lens[decodes:], self._page_size
        )
        arrays: dict[str, npt.NDArray[Any]] = {
            "token_ids": plan.token_ids,
            "positions": plan.positions,
            "kv_slots": plan.kv_slots.astype(np.int32),
            "token_slots": np.repeat(plan.slots, lengths),
            "context_lens": plan.context_lens[:decodes],
            "slots": plan.slots[plan.sampled],
            "rows": wanted[: len(plan.sampled) or 1],
            "temperature": plan.temperature,
            "uniform": draws(plan),
            "prefill_pages": pages,
        }
        arrays |= self._backend.decode_arrays(
            plan.block_tables[:decodes], plan.context_lens[:decodes]
        )
        self._staging.send(layout, arrays)
        fields = {
            name: self._staging.view(layout[name])[: len(array)] for name, array in arrays.items()
        }
        in_parts = plan.num_tokens <= self._prompts.largest
        step = FlashInferStep(
            self._backend,
            fields["positions"],
            fields["kv_slots"],
            self._backend.decode(fields, decodes) if decodes else None,
            decodes,
            self._prefill if decodes < plan.num_rows else None,
            self._prompts.attended[: plan.num_tokens] if in_parts else None,
        )
        if decodes < plan.num_rows:
            starts = plan.query_starts[decodes:] - decodes
            self._prefill.plan(starts, indptr, plan.context_lens[decodes:], fields["prefill_pages"])
        rows = fields["rows"]
        if len(wanted) > len(rows):  # a prompt's places may be more than the buffer holds
            rows = self._to_device(wanted)
        forward = self._prompts.forward if in_parts else self._decoder.forward
        return self._compute(forward, fields, fields["token_slots"], step, rows)

    def _compute(
        self,
        forward: Forward,
        fields: dict[str, torch.Tensor],
        token_slots: torch.Tensor,
        step: FlashInferStep,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits and tokens of the rows that sample, hidden states of `rows` beyond them.

        `rows` None: all sample.
        """
        ids = fields["token_ids"]
        ids = torch.where(ids < 0, self._last_token.index_select(0, token_slots), ids)
        hidden = forward(ids, step, rows)
        count = len(fields["slots"])
        if not count:
            return hidden[:0], self._last_token[:0], hidden
        logits = self._decoder.logits(hidden[:count])
        choice = (fields["temperature"], fields["uniform"], fields["slots"])
        tokens = choose_tokens(logits, *choice, self._last_token)
        return logits, tokens, hidden[count:]

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
