"""Tool calls: which format a model writes, and the parser for it."""

from __future__ import annotations

from openai_proxy.tools.mistral import MistralParser
from openai_proxy.tools.parsers import HermesParser, LlamaParser, ToolParser
from openai_proxy.tools.pieces import Piece, joined

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
}

__all__ = ["TOOL_PARSERS", "Piece", "ToolParser", "joined", "parser_for_template"]


def parser_for_template(template: str) -> str | None:
    """The name of the format that a chat template writes calls in; None: no known one."""
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM put XML of their own between the same marks.
        own = "<function=" in template or "<arg_key>" in template
        return None if own else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return None
