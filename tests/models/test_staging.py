"""The pinned buffers of a step's arrays: a copy that is still pending must not be written over.

The copies are real, but happen as late as a device may do them: when the event after them is waited
for. Upstream refilled one buffer while its copy was pending (#103).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tridentlm.staging import Layout, Staging, make_layout

LAYOUT: Layout = make_layout({"ids": ((4,), torch.int32), "pages": ((2, 3), torch.int32)})
WORDS = 64


class LateDevice:
    """Stands in for the device's buffer and its events."""

    def __init__(self) -> None:
        self.pending: list[torch.Tensor] = []
        self.arrived: list[list[int]] = []

    def __getitem__(self, _: slice) -> LateDevice:
        return self

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.pending.append(source)

    def event(self) -> LateEvent:
        return LateEvent(self)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.copies: list[torch.Tensor] = []

    def record(self) -> None:
        self.copies, self.device.pending = self.device.pending, []

    def synchronize(self) -> None:
        self.device.arrived += [source[:4].tolist() for source in self.copies]
        self.copies = []


def staging(monkeypatch: pytest.MonkeyPatch, turns: int) -> tuple[Staging, LateDevice]:
    device = LateDevice()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    made = Staging(WORDS, torch.device("cpu"), turns)
    made._buffer = device  # type: ignore[assignment]
    return made, device


def send(made: Staging, number: int) -> None:
    pages = np.full((1, 2), number, np.int32)
    made.send(LAYOUT, {"ids": np.full(4, number, np.int32), "pages": pages})


def finish(made: Staging, device: LateDevice) -> list[int]:
    events: list[Any] = made._copied
    for turn in range(len(events)):
        events[(made._turn + 1 + turn) % len(events)].synchronize()
    return [words[0] for words in device.arrived]


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_every_copy_has_the_values_of_its_own_step(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    made, device = staging(monkeypatch, turns)
    for number in range(6):
        send(made, number)
    assert finish(made, device) == [0, 1, 2, 3, 4, 5]


def test_without_the_wait_a_step_would_get_the_next_ones_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LateEvent, "synchronize", lambda self: None)
    made, device = staging(monkeypatch, 2)
    sources = []
    for number in range(3):
        send(made, number)
        sources += made._copied[made._turn].copies
    assert [int(source[0]) for source in sources] == [2, 1, 2]
    assert device.arrived == []
