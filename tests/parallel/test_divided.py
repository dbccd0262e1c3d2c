"""A model divided among ranks computes what the whole one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.factory import FAMILIES, make_tiny_model
from tests.models.plans import Chunk, PlanMaker
from tests.parallel.threads import on_every_rank
from tridentlm.backends.base import KVCache
from tridentlm.backends.torch import TorchBackend
from tridentlm.errors import InvalidRequest
from tridentlm.models import loading
from tridentlm.models.checkpoint import SafetensorsFolder
from tridentlm.models.config import ModelConfig
from tridentlm.models.decoder import Decoder
from tridentlm.models.shard import Shard, Split
from tridentlm.parallel.divide import divided
from tridentlm.parallel.group import Group

CPU = torch.device("cpu")
PAGE, PAGES = 4, 40


@torch.inference_mode()
def logits(folder: Path, group: Group) -> torch.Tensor:
    """Of two prompts in one step, and of a token after each."""
    whole = ModelConfig.from_folder(folder)
    config = divided(whole, group.shard.size)
    loaded = loading.load(whole, SafetensorsFolder(folder), torch.float32, CPU, shard=group.shard)
    decoder = Decoder(config, loaded, group=group)
    backend = TorchBackend(KVCache(config, PAGES, PAGE, torch.float32, CPU))
    plans, rows = PlanMaker(PAGES, PAGE), []
    prompts = [Chunk(0, list(range(5, 40))), Chunk(1, list(range(300, 280, -1)))]
    for chunks in (prompts, [Chunk(0, [7]), Chunk(1, [whole.vocab_size - 1])]):
        plan = plans.step(chunks)
        picked = torch.from_numpy(plan.query_starts[plan.sampled + 1] - 1)
        ids = torch.from_numpy(plan.token_ids)
        rows.append(decoder.logits(decoder.forward(ids, backend.begin_step(plan), picked)))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3_moe", {"num_key_value_heads": 1, "vocab_size": 389}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_logits_are_those_of_one_rank(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model(family, tmp_path / "model", **overrides)
    expected = logits(folder, Group())
    for size in (2, 4):
        for found in on_every_rank(size, lambda group: logits(folder, group)):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("pieces", "intervals", "padded"),
    [
        (8, [(0, 2), (2, 4), (4, 6), (6, 8)], []),
        (2, [(0, 1), (0, 1), (1, 2), (1, 2)], []),
        (1, [(0, 1)] * 4, []),
        (7, [(0, 2), (2, 4), (4, 6), (6, 7)], [3]),
        (5, [(0, 2), (2, 4), (4, 5), (5, 5)], [2, 3]),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_s_part_is_its_pieces_and_zeros_where_they_run_out(
    pieces: int, intervals: list[tuple[int, int]], padded: list[int], dim: int
) -> None:
    whole = torch.arange(1, 3 * pieces * 2 + 1).view(3 * pieces, 2)
    whole = whole if dim == 0 else whole.T.contiguous()
    for rank, (start, stop) in enumerate(intervals):
        shard = Shard(rank, 4)
        assert shard.interval(pieces) == (start, stop)
        part = shard.take(whole, tuple(whole.shape), Split(dim, pieces))
        assert part.shape[dim] == 3 * shard.count(pieces)
        filled = part.narrow(dim, 0, 3 * (stop - start))
        assert torch.equal(filled, whole.narrow(dim, 3 * start, 3 * (stop - start)))
        rest = part.narrow(dim, 3 * (stop - start), part.shape[dim] - 3 * (stop - start))
        assert (rest.numel() > 0) == (rank in padded)
        assert not rest.any()


def config_of(**changes: Any) -> ModelConfig:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return ModelConfig.from_hf(values | changes)


@pytest.mark.parametrize(
    ("ranks", "changes", "reason"),
    [
        (8, {}, "12 query heads cannot be divided by it. This model can have tp 1, 2, 4, 12."),
        (6, {}, "4 KV heads are neither a multiple nor a divisor of it"),
        (4, {"intermediate_size": 98}, "the intermediate size, 98, cannot be divided by it"),
    ],
)
def test_a_number_of_ranks_that_cannot_work_is_refused_with_those_that_do(
    ranks: int, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        divided(config_of(**changes), ranks)
    assert caught.value.param == "tp"
    works = [int(n) for n in caught.value.message.split("tp ")[-1].rstrip(".").split(", ")]
    for n in works:
        divided(config_of(**changes), n)
    assert ranks not in works


def test_kv_heads_are_never_fewer_than_one() -> None:
    assert divided(config_of(), 12).num_kv_heads == 1
    assert replace(divided(config_of(), 1)) == config_of()
