"""Writes one benchmark's result under benchmarks/results/, with what is needed to repeat it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "flashinfer-python",
    "transformers",
    "tritonclient",
    "nvidia-pytriton",
    "numpy",
    "tridentlm",
)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    import psutil

    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_gb = round(psutil.virtual_memory().total / 2**30)
    return {"cpu": model, "cores": psutil.cpu_count(), "memory_gb": memory_gb}


def commit() -> str:
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return head.stdout.strip() if head.returncode == 0 else "unknown"


def write(name: str, result: dict[str, Any]) -> Path:
    """Adds commit, hardware, versions and command to `result` and writes results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        **result,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
