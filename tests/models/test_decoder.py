"""Logits equal transformers' within 1e-4 in float32, however a sequence is cut into steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.conftest import PAGE, Engine, Reference
from tests.models.plans import Chunk

TOLERANCE = 1e-4


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 384, count).tolist()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", range(1, 2 * PAGE + 2))
def test_prefill_and_decode_match_at_every_length_around_a_page(
    tiny: Reference, engine: Engine, length: int
) -> None:
    sequence = tokens(length + PAGE + 1, seed=length)
    expected = tiny.logits(sequence)
    close(engine.logits(Chunk(0, sequence[:length]))[0], expected[length - 1])
    for position in range(length, len(sequence)):
        close(engine.logits(Chunk(0, [sequence[position]]))[0], expected[position])


@pytest.mark.parametrize("chunks", [(1, 30), (4, 4, 23), (5, 1, 7, 18), (30, 1), (8, 8, 8, 7)])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(
    tiny: Reference, engine: Engine, chunks: tuple[int, ...]
) -> None:
    prompt = tokens(31)
    start = 0
    for size in chunks:
        logits = engine.logits(Chunk(0, prompt[start : start + size]))
        start += size
        close(logits[0], tiny.logits(prompt)[start - 1])


def test_rows_of_a_mixed_step_do_not_disturb_each_other(tiny: Reference, engine: Engine) -> None:
    sequences = [tokens(60, seed) for seed in range(6)]
    starts = [3, 1, 40, 9]
    expected = [tiny.logits(sequence) for sequence in sequences]
    engine.logits(*(Chunk(slot, sequences[slot][:n]) for slot, n in enumerate(starts)))
    # Four rows decode while slot 4 prefills in two chunks; slot 5 comes at once in the second.
    for turn in range(2):
        decodes = [Chunk(slot, [sequences[slot][n + turn]]) for slot, n in enumerate(starts)]
        prefills = [Chunk(4, sequences[4][turn * 11 : turn * 11 + 11], samples=turn == 1)]
        if turn == 1:
            prefills.append(Chunk(5, sequences[5][:17]))
        logits = engine.logits(*decodes, *prefills)
        for slot, n in enumerate(starts):
            close(logits[slot], expected[slot][n + turn])
    close(logits[4], expected[4][21])
    close(logits[5], expected[5][16])


def test_decode_rows_of_very_different_context_match(tiny: Reference, engine: Engine) -> None:
    lengths = [300, 2, 70, 1, 280]  # more than one decode group
    sequences = [tokens(n + 1, seed=n) for n in lengths]
    engine.logits(*(Chunk(i, s[:-1]) for i, s in enumerate(sequences)))
    logits = engine.logits(*(Chunk(i, s[-1:]) for i, s in enumerate(sequences)))
    for row, sequence in zip(logits, sequences, strict=True):
        close(row, tiny.logits(sequence)[-1])
