"""Steps by graphs of their parts, with parts that are called where a GPU replays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.models.conftest import PAGE, PAGES, Reference
from tests.models.plans import Chunk, PlanMaker
from tridentlm.backends.base import StepAttention
from tridentlm.promptgraphs import PromptGraphs, token_sizes


@dataclass
class Part:
    replay: Callable[[], None]


@dataclass
class Into:
    """Attention whose results go to `out`."""

    attention: StepAttention
    out: torch.Tensor

    def attend(self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None) -> torch.Tensor:
        return self.out.copy_(self.attention.attend(layer, qkv, qk_norm))


@torch.inference_mode()
@pytest.mark.parametrize("rows", ["all", "last"])
def test_a_step_by_parts_is_the_decoders_own_whatever_ran_before(
    tiny: Reference, rows: str
) -> None:
    engine = tiny.engine()
    graphs = PromptGraphs(engine.decoder, [8, 16, 24], torch.float32, torch.device("cpu"))
    graphs.capture(Part)
    rng = np.random.default_rng(0)
    for count in (24, 1, 7, 8, 9, 17, 23):  # the longest first: its remains lie behind the others
        tokens = rng.integers(3, 384, count).tolist()
        plan = PlanMaker(PAGES, PAGE).step([Chunk(0, tokens, False)])
        chosen = None if rows == "all" else torch.tensor([plan.num_tokens - 1])
        ids = torch.from_numpy(plan.token_ids)
        expected = engine.decoder.forward(ids, engine.backend.begin_step(plan), chosen)
        into = Into(engine.backend.begin_step(plan), graphs.attended[: plan.num_tokens])
        assert torch.allclose(graphs.forward(ids, into, chosen), expected, 1e-4, 1e-5)


def test_sizes_end_with_the_largest() -> None:
    assert token_sizes(0) == []
    assert token_sizes(50) == [50]
    assert token_sizes(64) == [64]
    assert token_sizes(200) == [64, 128, 192, 200]
