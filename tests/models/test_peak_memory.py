"""What the profiled steps take is the most that any step takes, whatever requests ask.

On a GPU the KV pool gets the rest, so a step that took more would find no memory.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tridentlm.runner
from tests.factory import make_tiny_model
from tridentlm.config import EngineSettings
from tridentlm.core.extras import RequestExtras
from tridentlm.core.plan import StepPlan
from tridentlm.core.request import Request
from tridentlm.core.scheduler import Scheduler
from tridentlm.hub import ModelFiles
from tridentlm.runner import ModelRunner

VOCAB, LENGTH, ROWS, STEP, PAGE = 3000, 96, 8, 64, 4
SETTINGS = EngineSettings(
    device="cpu",
    page_size=PAGE,
    max_running=ROWS,
    max_model_len=LENGTH,
    max_step_tokens=STEP,
    load_format="dummy",
    threads=1,
)
EVERYTHING = RequestExtras(
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((1, 1.0),),
    logprobs=20,
    prompt_logprobs=20,
    grammar="some",
)


class Meter(TorchDispatchMode):
    """The most bytes alive at once of tensors made within; a KV cache on a CPU is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in storages(args):
            self._note(storage, 0)
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            self._note(storage, storage.nbytes())
        return result

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._live += size
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._forget, storage._cdata, size)

    def _forget(self, name: int, size: int) -> None:
        self._known.discard(name)
        self._live -= size


def storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and not value.is_mkldnn:  # packed weights
            yield value.untyped_storage()


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    config = json.loads((make_tiny_model("llama", tmp_path / "tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB}))
    return ModelRunner(SETTINGS, ModelFiles("hf", tmp_path, "bare", tmp_path))


@torch.inference_mode()
def profiled(runner: ModelRunner) -> int:
    with Meter() as meter:
        runner._profile(SETTINGS, STEP)
    return meter.peak


@torch.inference_mode()
def served(runner: ModelRunner) -> int:
    """Prompts of all lengths and long answers, of requests that ask for everything."""
    limits, rng = replace(runner.limits, num_pages=ROWS * LENGTH // PAGE), np.random.default_rng(0)
    scheduler = Scheduler(limits)
    for i, length in enumerate([LENGTH - 3, 1, 40, 7, 64, 20, 2, 9, LENGTH // 2, 30, 5, 11]):
        prompt = rng.integers(0, VOCAB, length).astype(np.int32)
        asked = {"temperature": 1.0, "top_p": 0.9, "seed": i, "extras": EVERYTHING}
        scheduler.add(Request(i, prompt, LENGTH - length, **asked))
    with Meter() as meter:
        executor = runner._make_executor(limits, limits.num_pages)
        while (plan := scheduler.schedule()) is not None:
            pending = executor.launch(allowing_all(plan))
            scheduler.commit(plan, pending.collect(), pending.logprobs())
    return meter.peak


def allowing_all(plan: StepPlan) -> StepPlan:
    """The plan with the masks of a grammar that allows every token."""
    assert plan.extras is not None
    masks = np.full((len(plan.extras.constrained), -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32)
    return replace(plan, extras=replace(plan.extras, allowed=masks))


def test_no_step_takes_more_than_the_profiled_ones(runner: ModelRunner) -> None:
    profile, traffic = profiled(runner), served(runner)
    print(profile, traffic)
    assert 0.5 * profile < traffic <= profile


def test_it_is_the_extras_that_make_the_peak(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test before sees what they take."""
    monkeypatch.setattr(tridentlm.runner, "with_all_extras", lambda plan, limits: plan)
    assert profiled(runner) < served(runner)
