"""Triton's entry to the relay model."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "engine" / "1"))

from tridentlm.triton.relay import TritonPythonModel

__all__ = ["TritonPythonModel"]
