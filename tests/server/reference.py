"""What transformers would say: greedy continuations of the same weights in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

TIE = 1e-4
"""Two logits this close may change places between two correct float32 programs."""


@dataclass
class Agreement:
    """Counts of compared tokens; `ties` are differences excused by TIE."""

    tokens: int = 0
    ties: int = 0


class Reference:
    """A model as transformers loads it from a folder, or from a GGUF file."""

    def __init__(self, path: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if where else path
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **where
        )
        self.model.eval()
        self.tally = Agreement()

    @torch.inference_mode()
    def check_greedy(self, prompt: list[int], output: list[int], what: str) -> None:
        """Every token of `output` is the greedy one after what came before it.

        One forward pass over prompt and output: the same as generating token by token, up to the
        first difference, and a difference fails.
        """
        logits = self.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.max(dim=-1).values
        chosen = logits[torch.arange(len(output)), torch.tensor(output)]
        for position, (token, gap) in enumerate(zip(output, (best - chosen).tolist(), strict=True)):
            self.tally.tokens += 1
            if token == int(logits[position].argmax()):
                continue
            self.tally.ties += 1
            assert gap <= TIE, f"{what}: token {position} is {token}, {gap:.4g} below the best"
