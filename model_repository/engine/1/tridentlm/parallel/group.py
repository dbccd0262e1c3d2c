"""What the ranks of a tensor-parallel engine exchange while they compute a step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from tridentlm.models.shard import Shard

ABORT_SECONDS = 1.0


class Group:
    """The ranks, seen by one of them. This one is alone and has nothing to exchange.

    Every rank makes the same calls in the same order; each waits for all of them.
    """

    shard = Shard()

    @property
    def is_leader(self) -> bool:
        """Whether this rank chooses the tokens."""
        return self.shard.rank == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which may be overwritten."""
        return x

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Every rank's `x` [n, m], side by side in the order of the ranks: [n, width].

        What exceeds `width` is padding.
        """
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrites `x` with the leader's."""

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def wait_until_loaded(self) -> None:
        """Returns when every rank has loaded its weights and says so by this call."""


class DistributedGroup(Group):
    """Tensors on a GPU go through NCCL, others through gloo.

    Both are torch's own objects, but not its "default process group": a process has one of those,
    and a start that failed leaves a number behind with which the next one would never meet.
    """

    def __init__(
        self,
        shard: Shard,
        store: Any,
        device: str,
        timeout: float,
        wait_until_loaded: Callable[[], None],
    ) -> None:
        """Returns when all ranks have found each other in `store`.

        `device` is "cuda" or "cpu". On CUDA, rank r computes on the r-th visible device. Raises
        RuntimeError when one does not come, or later keeps the others waiting, for `timeout` s.
        """
        self.shard, self._store, self._wait_until_loaded = shard, store, wait_until_loaded
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        limit = timedelta(seconds=timeout)
        place = (shard.rank, shard.size)
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), *place, limit)
        self._nccl = _connect_nccl(store, shard, limit) if device == "cuda" else None
        self._tensors: Any = self._nccl or self._gloo
        self._sum = _options(dist.AllreduceOptions())
        self._smallest = _options(dist.AllreduceOptions(), reduceOp=dist.ReduceOp.MIN)
        self._gathering = _options(AllgatherOptions())
        self._from_leader = _options(dist.BroadcastOptions(), rootRank=0)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        _wait(self._tensors.allreduce([x], self._sum))
        return x

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        _wait(self._tensors.allgather([parts], [x], self._gathering))
        return torch.cat(parts, -1)[:, :width].contiguous()

    def broadcast(self, x: torch.Tensor) -> None:
        _wait(self._tensors.broadcast([x], self._from_leader))

    def least(self, value: int) -> int:
        smallest = torch.tensor(value)
        _wait(self._gloo.allreduce([smallest], self._smallest))
        return int(smallest)

    def wait_until_loaded(self) -> None:
        self._wait_until_loaded()

    def close(self, patience: float = ABORT_SECONDS) -> None:
        """Lets go of the other ranks, dead or alive. CUDA Graphs with this group must be gone.

        An end that takes longer than `patience` s goes on in a thread, which a process that ends by
        `os._exit` may ignore; one that frees its objects could free them under that thread.
        """
        if self._nccl is None:
            return
        # An orderly end would wait for the others, and any end waits for graphs: for ever, where a
        # failure still holds one. The process may end meanwhile.
        ending = threading.Thread(target=self._nccl.abort, daemon=True)
        ending.start()
        ending.join(patience)


def open_store(folder: Path, timeout: float) -> Any:
    """Where the ranks of one start find each other: the same `folder` for all.

    A file, for want of names: torch's store over TCP asks the resolver for the name behind each
    address, which takes 5 s or more a question where no name server answers.

    Opening it waits without end, and holds Python's lock meanwhile, for the rest of what a rank has
    begun to write and died or was stopped over. So the leader opens it before any other may, and
    every rank before it says that it has arrived; what comes later lets Python's lock go.
    """
    store = FileStore(str(folder / "store"))
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _connect_nccl(store: Any, shard: Shard, limit: timedelta) -> Any:
    """With a communicator made: nothing of it may be set up while a graph is captured."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast fails where the driver forbids it
    device = torch.device("cuda", shard.rank)
    torch.cuda.set_device(device)
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    options.group_name, options.global_ranks_in_group = "ranks", []
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), shard.rank, shard.size, options)
    nccl.eager_connect_single_device(device)
    return nccl


def _options(options: Any, **values: Any) -> Any:
    options.asyncOp = False  # NCCL runs on the current stream: the one that a CUDA Graph captures
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _wait(work: Any) -> None:
    if work is not None:  # as it is of NCCL on the current stream
        work.wait()
