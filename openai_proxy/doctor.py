"""`tridentlm doctor`: what is found, what is missing, what to do about it. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from openai_proxy.launchplan import port_is_free
from openai_proxy.sharedmemory import SHM, abandoned, regions, remove_abandoned
from openai_proxy.tritonserver import (
    TritonServer,
    libpython,
    locate,
    numpy_problem,
    stub_problem,
)
from tridentlm.errors import TridentError
from tridentlm.gpus import torch_cuda
from tridentlm.hub import DEFAULT_FILE, cache_dir

GIB = 1 << 30
PORTS = (8000, 8100, 8101, 8102)
CPUINFO = Path("/proc/cpuinfo")
SHM_ENOUGH = 256 << 20  # Triton takes 2 MiB a Python model instance and grows with large messages
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` "fail": `serve` cannot work. `advice`: what to do, or what it means."""

    subject: str
    level: Literal["ok", "note", "fail"]
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which they are worth reading."""
    findings = [_python(), *_torch(), *_libraries()]
    try:
        server = locate()
    except TridentError as error:
        findings.append(Finding("tritonserver", "fail", "none", error.message))
    else:
        findings += _triton(server)
    return [*findings, _cpu(), _memory(), _shared_memory(), _ports(), _model_cache()]


def run_doctor(say: Callable[[object], None], *, remove_regions: bool = False) -> int:
    """Shows the findings (`say`: a rich Console.print); 0 when `serve` can work, else 1.

    `remove_regions`: removes abandoned shared memory before.
    """
    from rich.table import Table

    if remove_regions:
        say(f"removed {remove_abandoned()} regions that no process had open")
    findings = examine()
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    table = Table("", "", box=None, pad_edge=False)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for f in findings:
        mark = f"[{colours[f.level]}]{f.level}[/]"
        table.add_row(mark, f.subject, _plain(f.found), _plain(f.advice))
    say(table)
    failed = [f.subject for f in findings if f.level == "fail"]
    say(f"serve cannot work: {', '.join(failed)}" if failed else "serve can work")
    return 1 if failed else 0


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Finding("Python", "ok", f"{version} ({sys.executable})")
    return Finding("Python", "fail", version, "Use Python 3.10 to 3.13.")


def _torch() -> Iterator[Finding]:
    version, gpus = _installed("torch"), _gpus()
    if not version:
        yield Finding("torch", "fail", "none", "pip install 'torch>=2.8'")
        return
    cuda = torch_cuda()
    build = f"{version} (CUDA {cuda})" if cuda else f"{version} (CPU only)"
    if gpus and not cuda:
        yield Finding("torch", "note", build, "A GPU is there: install a CUDA build to use it.")
    elif cuda and not gpus:
        yield Finding("torch", "note", build, f"No GPU found; a smaller CPU build: {CPU_TORCH}")
    else:
        yield Finding("torch", "ok", build)
    yield Finding("GPU", "ok", "; ".join(gpus) or "none: the engine runs on the CPU")
    if gpus and cuda:
        flashinfer = _installed("flashinfer-python")
        advice = "" if flashinfer else "For the fast kernels: pip install 'tridentlm[cuda]'"
        level: Literal["ok", "note"] = "ok" if flashinfer else "note"
        yield Finding("flashinfer", level, flashinfer or "none", advice)


def _libraries() -> Iterator[Finding]:
    for name in ("tritonclient", "transformers", "tokenizers", "fastapi", "pyzmq"):
        version = _installed(name)
        level: Literal["ok", "fail"] = "ok" if version else "fail"
        yield Finding(name, level, version or "none", "" if version else f"pip install {name}")


def _triton(server: TritonServer) -> Iterator[Finding]:
    version = server.version or "version unknown"
    yield Finding("tritonserver", "ok", f"{version}, from {server.origin} ({server.binary})")
    problem = numpy_problem(server)
    numpy = importlib.metadata.version("numpy")
    advice = "" if server.reads_numpy2 else "This Triton needs numpy < 2."
    yield Finding("numpy", "fail" if problem else "ok", numpy, problem or advice)
    problem = stub_problem(server)
    advice = "Install the shared library of this Python (Debian: apt install libpython3-dev)."
    if problem:
        yield Finding("Python backend", "fail", problem, advice)
    else:
        yield Finding("Python backend", "ok", f"its stub starts ({server.stub.name})")
    shared = libpython()
    yield Finding("libpython", "ok" if shared else "note", str(shared or "not at its usual places"))


def _cpu() -> Finding:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    native = re.search(r"\b(amx_bf16|avx512_bf16)\b", flags)
    found = f"{psutil.cpu_count()} threads, bfloat16 {'native' if native else 'not native'}"
    if native:
        return Finding("CPU", "ok", found)
    slow = "float32 is the default on a CPU; bfloat16 would be 30 to 90 times slower here."
    return Finding("CPU", "ok", found, slow)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < 2 * GIB:
        return Finding("memory", "note", found, "The default model needs about 2 GiB.")
    return Finding("memory", "ok", found)


def _shared_memory() -> Finding:
    if not SHM.is_dir():
        return Finding("/dev/shm", "fail", "none", "Mount a tmpfs on /dev/shm.")
    usage = shutil.disk_usage(SHM)
    found = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    found += f", {len(regions())} regions of Python backends"
    advice = []
    if left := len(abandoned()):
        advice.append(
            f"{left} belong to no process: `tridentlm doctor --remove-regions` removes them."
        )
    if usage.free < SHM_ENOUGH:
        advice.append("Too little is free: docker run --shm-size=1g.")
    return Finding("/dev/shm", "note" if advice else "ok", found, " ".join(advice))


def _ports() -> Finding:
    taken = [str(port) for port in PORTS if not port_is_free("127.0.0.1", port)]
    if taken:
        advice = "Stop what uses them, or give others (`tridentlm serve --help`)."
        return Finding("ports", "note", f"in use: {', '.join(taken)}", advice)
    return Finding("ports", "ok", f"{', '.join(map(str, PORTS))} are free")


def _model_cache() -> Finding:
    try:
        folder = cache_dir()
    except TridentError as error:
        return Finding("model cache", "fail", "none", error.message)
    free = shutil.disk_usage(folder).free / GIB
    found = f"{folder}, {free:.1f} GiB free"
    if (folder / DEFAULT_FILE).exists():
        return Finding("model cache", "ok", f"{found}, has the default model")
    return Finding(
        "model cache", "ok", found, "The first start downloads the default model (98 MB)."
    )


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
