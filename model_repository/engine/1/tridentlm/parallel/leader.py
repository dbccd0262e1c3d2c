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

import atexit
import contextlib
import queue
import threading
import time
from dataclasses import replace
from typing import Any

import torch

from tridentlm.config import EngineSettings
from tridentlm.core.plan import StepPlan
from tridentlm.core.runner import PendingStep
from tridentlm.errors import InternalError, TridentError
from tridentlm.hub import ModelFiles
from tridentlm.models.shard import Shard
from tridentlm.parallel.followers import ARRIVE, GET_READY, LOAD, Followers, Job
from tridentlm.parallel.group import DistributedGroup, open_store
from tridentlm.runner import ModelRunner

JOIN_LOOK_SECONDS = 0.1
END_SECONDS = 10.0


class ParallelRunner:
    """Implements `core.runner.Runner` with `settings.tp` processes, this one included.

    While it is open, a follower that ends while nothing is computed, or while a GPU computes,
    ends this process too.
    """

    def __init__(self, settings: EngineSettings, files: ModelFiles, followers: Followers) -> None:
        """Loads the model on all ranks.

        Raises InvalidRequest or ModelNotFound, and InternalError for a rank that ends or that is
        `settings.rank_timeout` seconds behind this one.
        """
        self._followers = followers
        self._group: DistributedGroup | None = None
        try:
            self._runner = self._load(settings, files)
            followers.wait_for(GET_READY, settings.rank_timeout)
        except BaseException as error:
            reason = error if isinstance(error, TridentError) else followers.reason()
            self._abandon()
            if reason is None or reason is error:
                raise
            raise reason from error
        self.limits, self.startup_seconds = self._runner.limits, self._runner.startup_seconds
        self.device, self.dtype = self._runner.device, self._runner.dtype
        atexit.register(self.close)  # before Python frees graphs and NCCL in any order

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
        """Frees the model and ends the followers."""
        atexit.unregister(self.close)
        self._runner.close()  # waits for what is launched, and frees the graphs, while all live
        self._followers.stop()
        if self._group is not None:
            self._group.close(END_SECONDS)
        self._followers.wait()

    def _load(self, settings: EngineSettings, files: ModelFiles) -> ModelRunner:
        use_cuda = settings.device != "cpu" and torch.cuda.is_available()
        device, timeout = "cuda" if use_cuda else "cpu", settings.rank_timeout
        if device == "cpu" and not settings.threads:
            threads = max(1, torch.get_num_threads() // settings.tp)
            settings = replace(settings, threads=threads)
        store = open_store(self._followers.folder, timeout)
        self._followers.assign(Job(0, settings, files, device))
        self._followers.wait_for(ARRIVE, timeout)
        self._group = self._join(store, device, timeout)
        return ModelRunner(settings, files, self._group)

    def _join(self, store: Any, device: str, timeout: float) -> DistributedGroup:
        """In a thread, because NCCL waits without end for a rank that does not come."""

        def wait_until_loaded() -> None:
            self._followers.wait_for(LOAD, timeout)
            self._followers.go()

        def join() -> None:
            try:
                shard = Shard(0, self._followers.ranks)
                outcome.put(DistributedGroup(shard, store, device, timeout, wait_until_loaded))
            except Exception as error:
                outcome.put(error)

        outcome: queue.SimpleQueue[DistributedGroup | Exception] = queue.SimpleQueue()
        joined: DistributedGroup | Exception | None = None
        deadline = time.monotonic() + timeout
        threading.Thread(target=join, daemon=True).start()
        while joined is None and time.monotonic() < deadline and not self._followers.ended():
            with contextlib.suppress(queue.Empty):
                joined = outcome.get(timeout=JOIN_LOOK_SECONDS)
        if isinstance(joined, DistributedGroup):
            return joined
        if reason := self._followers.reason():
            raise reason
        if joined is not None and time.monotonic() < deadline:
            raise joined
        self._followers.trace()
        message = f"The ranks did not join within {timeout:g} s (rank_timeout)."
        raise InternalError(message) from joined

    def _abandon(self) -> None:
        atexit.unregister(self.close)
        if self._group is not None:
            self._group.close()
        self._followers.kill()
