"""Log-probabilities of tokens, in one pass over the logits of the rows that ask.

    log p(t) = logit(t) - logsumexp(logits)     in float32; the rank and the likeliest from logits

They are the model's own ("raw"), before bias, penalties, temperature and filters: what vLLM tells
by default and what transformers computes from the same prefix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tridentlm.core.extras import Logprobs, Measured
from tridentlm.core.plan import StepPlan

SLICE = 64
"""Rows in memory at once, in float32; a prompt's logits are computed for them alone."""

Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""tokens int32 [n, 1 + top], values float32 [n, 1 + top], ranks int32 [n]."""


def measure(
    plan: StepPlan,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    prompt_hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
) -> Table:
    """What `plan.extras.measured` asks for: [Q + L] rows, on the device.

    logits [S, vocab] are the model's, tokens [S] what was sampled; prompt_hidden [Q, hidden_size]
    is the last layer's output at the places in prompts, which `head` turns into logits.
    """
    measured = _measured_of(plan)
    targets, rows = (
        torch.from_numpy(array).to(logits.device, non_blocking=True)
        for array in (measured.targets, measured.rows)
    )
    tables = []
    for start in range(0, len(targets), SLICE):
        part = slice(start, start + SLICE)
        tables.append(of_rows(head(prompt_hidden[part]), targets[part], measured.top))
    for start in range(0, len(rows), SLICE):
        some = rows[start : start + SLICE]
        tables.append(of_rows(logits[some], tokens[some], measured.top))
    told, values, ranks = (torch.cat(parts) for parts in zip(*tables, strict=True))
    return told, values, ranks


def of_rows(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Table:
    """Of `tokens` [n] under logits [n, vocab], and of the `top` likeliest beside them."""
    logits, tokens = logits.float(), tokens.long()[:, None]
    own = logits.gather(-1, tokens)
    ranks = (logits > own).sum(-1) + 1
    likeliest = logits.topk(min(top, logits.shape[-1]), -1)
    values = torch.cat([own, likeliest.values], -1) - logits.logsumexp(-1, keepdim=True)
    return torch.cat([tokens, likeliest.indices], -1).int(), values, ranks.int()


def to_host(plan: StepPlan, table: Table) -> Logprobs:
    """The finished table, tensors of the host, with what the plan knows of its rows."""
    measured = _measured_of(plan)
    tokens, values, ranks = (tensor.numpy() for tensor in table)
    return Logprobs(measured.ids, measured.positions, tokens, values, ranks)


def _measured_of(plan: StepPlan) -> Measured:
    assert plan.extras is not None, "nobody asks for log-probabilities"
    assert plan.extras.measured is not None, "nobody asks for log-probabilities"
    return plan.extras.measured
