"""Rotary position embedding (Su et al., 2021): the frequencies of a model and their angles."""

from __future__ import annotations

import torch

from tridentlm.models.config import ModelConfig


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope.theta**exponents)
    if config.rope.factors is None:
        return frequencies
    return frequencies / torch.tensor(config.rope.factors, dtype=torch.float32)


def rotary_table(config: ModelConfig, positions: int, device: torch.device) -> torch.Tensor:
    """cos and sin of each position, scaled, side by side: float32 [positions, head_dim]."""
    angles = torch.arange(positions, device=device)[:, None] * rotary_frequencies(config).to(device)
    return torch.cat((angles.cos(), angles.sin()), -1) * config.rope.magnitude
