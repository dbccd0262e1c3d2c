from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tridentlm.triton import bls
from tridentlm.triton.bls import Calls


class FakeRequest:
    """Answers with one response for each text, an error where it is not empty."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self.iterator: weakref.ref[Any] | None = None

    def exec(self, decoupled: bool) -> Iterator[Any]:
        assert decoupled
        responses = self._responses()
        self.iterator = weakref.ref(responses)
        return responses

    def _responses(self) -> Iterator[Any]:
        for text in self._texts:
            error = SimpleNamespace(message=lambda text=text: text)
            yield SimpleNamespace(has_error=lambda text=text: bool(text), error=lambda e=error: e)


def test_a_call_reads_to_the_end_and_tells_its_errors() -> None:
    assert Calls().run(FakeRequest("", "lost", "", "late")) == ["lost", "late"]
    assert Calls().run(FakeRequest("")) == []


def test_an_iterator_outlives_the_stubs_own_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(bls.time, "monotonic", lambda: now)
    calls, first, second = Calls(), FakeRequest(""), FakeRequest("")
    calls.run(first)
    now += bls.KEPT_SECONDS / 2
    calls.run(second)
    gc.collect()
    assert first.iterator is not None
    assert first.iterator() is not None
    now += bls.KEPT_SECONDS
    calls.run(FakeRequest(""))
    gc.collect()
    assert first.iterator() is None
    assert second.iterator is not None
    assert second.iterator() is not None
