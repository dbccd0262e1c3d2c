"""Reads Triton's log for the person who started the server: what to show, what a failure was."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LOADED = re.compile(r"successfully loaded '([^']+)'")
_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (?:\w+: )?(.*)")
_SEVERE = re.compile(r"[WEF]\d{4} [\d:.]+ \d+ ([\w.]+:\d+)\] (.*)")
_OTHER = re.compile(r"I\d{4} |\s|$|[+|;]|At:$")  # information, tables, the inside of a traceback
_NO_GPU = (
    "CudaDriverHelper has not been initialized",
    "CUDA driver version is insufficient",
    "failed to allocate pinned system memory: no pinned memory pool",
)
LONGEST = 400


def readable(line: str) -> str:
    """What to show of one line; "" for what only a developer wants to see."""
    loaded = _LOADED.search(line)
    if loaded:
        return f"loaded {loaded.group(1)}"
    severe = _SEVERE.match(line)
    if severe:
        text = _first_part(severe.group(2))
        return "" if any(known in text for known in _NO_GPU) else f"{text} ({severe.group(1)})"
    return "" if _OTHER.match(line) else line[:LONGEST]


def load_failures(lines: Iterable[str]) -> list[str]:
    """ "engine: AttributeError: ..." for each model that Triton says it could not load."""
    found = (_FAILED.search(line) for line in lines)
    return [f"{match.group(1)}: {_first_part(match.group(2))}" for match in found if match]


def _first_part(text: str) -> str:
    # Triton writes a Python error as one line with its traceback after an escaped "\n\nAt:".
    return text.strip('"').split("\\n")[0].strip('"')[:LONGEST]
