"""Text: chat messages and prompts to token ids, token ids back to text, stop strings.

The names load on first use: `tridentlm.text.messages` stays importable without `tokenizers` and
`transformers`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tridentlm.text.detokenizer import IncrementalDetokenizer
    from tridentlm.text.messages import check_messages
    from tridentlm.text.stops import StopChecker
    from tridentlm.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopChecker", "Tokenizer", "check_messages"]

_HOMES = {
    "IncrementalDetokenizer": "detokenizer",
    "StopChecker": "stops",
    "Tokenizer": "tokenizer",
    "check_messages": "messages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
