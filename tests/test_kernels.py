"""The benchmark's account of where the time of a step goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kernels import Spent, exchange, summary
from benchmarks.offline import PREFILL_STEPS, Clock, Job, profile, run
from tests.factory import make_tiny_model
from tests.parallel.conftest import settings_of
from tridentlm.engine import Engine, build_runner


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)",
            "all_reduce",
        ),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgs)", "broadcast"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", "other"),
        ("gloo:all_reduce", "all_reduce"),
        ("nccl:all_reduce", ""),  # the annotation around the kernel
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", ""),
    ],
)
def test_what_ranks_exchange_is_known_by_name(name: str, kind: str) -> None:
    assert exchange(name) == kind


def test_shares_are_of_the_device_s_time() -> None:
    spent = [
        Spent("gemm", 6.0, 8),
        Spent("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 3.0, 16),
        Spent("ncclDevKernel_Broadcast_RING_LL", 1.0, 2),
    ]
    told = summary(spent, steps=2, wall_ms=12.0, device="cuda")
    assert (told["wall_ms"], told["device_ms"], told["exchange_share"]) == (6.0, 5.0, 0.4)
    reduced = {"ms": 1.5, "count": 8.0, "us_each": 187.5, "share": 0.3}
    assert told["exchanges"]["all_reduce"] == reduced
    assert [kernel["name"] for kernel in told["kernels"]] == [kernel.name for kernel in spent]
    assert told["kernels"][0]["share"] == 0.6


def test_two_ranks_on_a_cpu_tell_what_they_exchange(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    runner, _ = build_runner(settings_of(folder, 2))
    layers, job = 2, Job.make(6, 60, 100)
    clock = Clock(runner)
    engine = Engine(clock)
    steps = run(engine, clock, job, 0)["steps"]
    told = profile(engine, job, runner.device, steps, tmp_path / "traces")
    engine.close()
    assert steps > 2 * PREFILL_STEPS
    for part in ("prefill", "decode"):
        assert 0 < told[part]["exchange_share"] < 1
        counts = {kind: told["count"] for kind, told in told[part]["exchanges"].items()}
        # The embedding, and the two halves of a layer.
        assert counts == {"all_reduce": 1 + 2 * layers, "all_gather": 1, "broadcast": 1}
        assert (tmp_path / "traces" / f"{part}.json.gz").stat().st_size > 0
