"""What the ranks of a tensor-parallel engine exchange while they compute a step."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tridentlm.models.shard import Shard

LOOPBACK = "127.0.0.1"


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


class DistributedGroup(Group):
    """Tensors on a GPU go through NCCL, others through gloo."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, -1)[:, :width].contiguous()

    def broadcast(self, x: torch.Tensor) -> None:
        dist.broadcast(x, 0)

    def least(self, value: int) -> int:
        smallest = torch.tensor(value)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)


def open_store() -> tuple[Any, int]:
    """Where the ranks find each other, and its port. Only this host reaches it."""
    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    descriptor = server.detach()  # the store closes it
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


@contextmanager
def joined(shard: Shard, store: Any, device: str) -> Iterator[Group]:
    """This process as one of the ranks; `store`: the leader's, or its port there.

    `device` is "cuda" or "cpu". On CUDA, rank r computes on the r-th visible device.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast fails where the driver forbids it
    if isinstance(store, int):
        store = TCPStore(LOOPBACK, store, is_master=False)
    if device == "cuda":
        torch.cuda.set_device(shard.rank)
    # Ranks meet under a number that each process counts for itself, and a failure can leave behind.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=shard.rank,
        world_size=shard.size,
    )
    try:
        yield DistributedGroup(shard)
    finally:
        dist.destroy_process_group()
