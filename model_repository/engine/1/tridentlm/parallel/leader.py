"""Rank 0: plans are made in its process, passed on to the other ranks, and computed by all.

engine process = rank 0                    follower = rank 1, 2, ...
schedule ─ StepPlan ─ one message each ──► receive
launch                                     launch
  embedding, layers  ◄── all_reduce ──►      the same with its ids, heads, inner parts
  logits             ◄── all_gather ──►      those of its part of the vocabulary
  sample: last_token ─── broadcast ───►      takes them over
collect, commit                            receive
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from tridentlm.config import EngineSettings
from tridentlm.core.plan import StepPlan
from tridentlm.core.runner import PendingStep
from tridentlm.errors import InvalidRequest
from tridentlm.hub import ModelFiles
from tridentlm.models.shard import Shard
from tridentlm.parallel.followers import Followers, Job
from tridentlm.parallel.group import joined, open_store
from tridentlm.runner import ModelRunner


class ParallelRunner:
    """Implements `core.runner.Runner` with `settings.tp` processes, this one included.

    At most one at a time in a process. While it is open, a follower that ends while nothing is
    computed ends this process too.
    """

    def __init__(self, settings: EngineSettings, files: ModelFiles, followers: Followers) -> None:
        """Loads the model on all ranks. Raises InvalidRequest or ModelNotFound."""
        self._exits, self._followers = contextlib.ExitStack(), followers
        try:
            self._runner = self._load(settings, files)
            followers.wait_until_ready()
        except Exception as error:
            reason = followers.reason() or error
            self._abandon()
            raise reason from error
        self.limits, self.startup_seconds = self._runner.limits, self._runner.startup_seconds
        self.device, self.dtype = self._runner.device, self._runner.dtype

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises InternalError when a follower has ended; the runner is closed then."""
        try:
            self._followers.send(plan)
            return self._runner.launch(plan)
        except Exception as error:
            reason = self._followers.reason()
            self._abandon()
            if reason is None:
                raise
            raise reason from error

    def close(self) -> None:
        """Ends the followers and frees the model."""
        self._followers.stop()
        with contextlib.suppress(RuntimeError):  # of ranks that are gone
            self._exits.close()
        self._followers.wait()
        self._runner.close()

    def _load(self, settings: EngineSettings, files: ModelFiles) -> ModelRunner:
        device = _device(settings)
        if device == "cpu" and not settings.threads:
            threads = max(1, torch.get_num_threads() // settings.tp)
            settings = replace(settings, threads=threads)
        store, port = open_store()
        self._followers.assign(Job(0, settings, files, device, port))
        group = self._exits.enter_context(joined(Shard(0, settings.tp), store, device))
        return ModelRunner(settings, files, group)

    def _abandon(self) -> None:
        self._followers.kill()
        with contextlib.suppress(RuntimeError):
            self._exits.close()


def _device(settings: EngineSettings) -> str:
    """The device of all ranks. Raises InvalidRequest when there are fewer GPUs than ranks."""
    if settings.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    visible = torch.cuda.device_count()
    if settings.tp > visible:
        raise InvalidRequest(
            f"tp is {settings.tp}, and {visible} CUDA devices are visible: tp can be 1 to "
            f"{visible}.",
            param="tp",
        )
    return "cuda"
