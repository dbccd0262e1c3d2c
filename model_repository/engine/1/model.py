"""Triton's entry to the engine model."""

from tridentlm.triton.engine import TritonPythonModel

__all__ = ["TritonPythonModel"]
