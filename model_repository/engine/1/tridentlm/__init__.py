"""TridentLM's engine: scheduler, paged KV cache, model runner and the Triton adapters.

Importing the package is cheap: torch is loaded only when `LLM` is first touched, because Triton
imports the adapters more than once while it loads a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tridentlm.core.request import SamplingParams
    from tridentlm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tridentlm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tridentlm.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tridentlm' has no attribute {name!r}")
