"""Answers held to a grammar: JSON schemas, regular expressions, choices, tool calls."""

from __future__ import annotations

from tridentlm.grammar.spec import check

__all__ = ["check"]
