"""Log-probabilities of tokens, in one pass over the logits of the rows that ask.

    log p(t) = logit(t) - logsumexp(logits)     in float32; the rank and the likeliest from logits

They are the model's own ("raw"), before bias, penalties, temperature and filters: what vLLM tells
by default and what transformers computes from the same prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tridentlm.core.extras import Logprobs, Measured
from tridentlm.core.plan import StepPlan

SLICE = 64
"""Rows of a prompt whose logits are in memory at once."""

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
    tables = list(_of_prompts(measured, prompt_hidden, head))
    if len(measured.rows):
        rows = torch.from_numpy(measured.rows).to(logits.device)
        tables.append(of_rows(logits[rows], tokens[rows], measured.top))
    tokens, values, ranks = (torch.cat(parts) for parts in zip(*tables, strict=True))
    return tokens, values, ranks


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


def _of_prompts(
    measured: Measured, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[Table]:
    targets = torch.from_numpy(measured.targets).to(hidden.device)
    for start in range(0, len(targets), SLICE):
        end = start + SLICE
        yield of_rows(head(hidden[start:end]), targets[start:end], measured.top)


def _measured_of(plan: StepPlan) -> Measured:
    assert plan.extras is not None, "nobody asks for log-probabilities"
    assert plan.extras.measured is not None, "nobody asks for log-probabilities"
    return plan.extras.measured
