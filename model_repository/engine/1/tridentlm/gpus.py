"""What torch would find of CUDA, without torch: its import takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

DRIVER = "libcuda.so.1"


def torch_cuda() -> str:
    """The CUDA version of the installed torch, "" for a CPU build or none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    source = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", source, re.MULTILINE)
    return found.group(1) if found else ""


def visible_gpus() -> int:
    """How many GPUs the installed torch can use here (`CUDA_VISIBLE_DEVICES` limits them)."""
    if not torch_cuda():
        return 0
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
