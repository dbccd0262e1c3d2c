"""The part of a model that each of several ranks computes, as a config of its own."""

from __future__ import annotations

from dataclasses import replace

from tridentlm.errors import InvalidRequest
from tridentlm.models.config import ModelConfig


def divided(config: ModelConfig, ranks: int) -> ModelConfig:
    """Each rank's heads and its part of the inner sizes; the rest is every rank's.

    A KV head is held by several ranks where there are fewer than ranks. Raises InvalidRequest,
    naming the numbers of ranks that work, for one that does not.
    """
    obstacle = _obstacle(config, ranks)
    if obstacle:
        works = [n for n in range(1, config.num_heads + 1) if not _obstacle(config, n)]
        raise InvalidRequest(
            f"tp is {ranks}, and {obstacle}. This model can have tp {', '.join(map(str, works))}.",
            param="tp",
        )
    experts = config.experts
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(config.num_kv_heads // ranks, 1),
        intermediate_size=config.intermediate_size // ranks,
        experts=experts and replace(experts, size=experts.size // ranks),
    )


def _obstacle(config: ModelConfig, ranks: int) -> str:
    """Why the model cannot be divided so, or an empty string."""
    if config.num_heads % ranks:
        return f"{config.num_heads} query heads cannot be divided by it"
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        return f"{config.num_kv_heads} KV heads are neither a multiple nor a divisor of it"
    sizes = {"intermediate size": config.intermediate_size}
    if config.experts is not None:
        all_sparse = len(config.experts.layers) == config.num_layers
        sizes = {} if all_sparse else sizes
        sizes["inner size of an expert"] = config.experts.size
    for name, size in sizes.items():
        if size % ranks:
            return f"the {name}, {size}, cannot be divided by it"
    return ""
