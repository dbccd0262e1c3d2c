"""Triton's entry to the tokenizer model."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "engine" / "1"))

from tridentlm.triton.tokenizer import TritonPythonModel

__all__ = ["TritonPythonModel"]
