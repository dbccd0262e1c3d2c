"""Grammars of tool calls, in the formats that models write and `openai_proxy.tools` reads.

hermes        <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>     one a line
llama3_json   {"name": "f", "parameters": {...}}                              `; ` between
mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}]                 one list; or
              [TOOL_CALLS]f[ARGS]{...}                         where [ARGS] is a token
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FORMATS = ("hermes", "llama3_json", "mistral")

Mark = Callable[[str], str]
"""How a grammar writes a mark: as its special token where it has one, else as text."""


@dataclass(frozen=True, slots=True)
class Calls:
    """`functions` maps a name to the grammar rule of its arguments. With `parallel` there may be
    several calls. Unless `required`, there may be none, and text around them; or instead of them
    what the rule `otherwise` says."""

    functions: Mapping[str, str]
    parallel: bool
    required: bool
    otherwise: str | None = None


def literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def rules(format: str, calls: Calls, mark: Mark, specials: Mapping[str, int]) -> str:
    """The Lark rules of a whole answer; it begins at `start`."""
    alone = calls.required or calls.otherwise is not None
    if format == "hermes":
        lines = _hermes(calls, mark, specials, alone)
    elif format == "llama3_json":
        lines = _llama(calls, alone)
    else:
        lines = _mistral(calls, mark, specials, alone)
    other = "" if calls.required or calls.otherwise is None else f" | {calls.otherwise}"
    return "\n".join([f"start: calls{other}", *lines]) + "\n"


def _hermes(calls: Calls, mark: Mark, specials: Mapping[str, int], alone: bool) -> list[str]:
    opening, closing = mark("<tool_call>"), mark("</tool_call>")
    body = rf'"\n" object "\n" {closing}'
    lines = [_objects(calls.functions, "arguments")]
    if alone:
        more = _more(r'"\n" call', calls.parallel)
        return [*lines, f"calls: call{more}", f"call: {opening} {body}"]
    lines += [*_text_up_to("<tool_call>", specials), f"call: before {body}"]
    return [*lines, f"calls: call{'*' if calls.parallel else '?'} TEXT"]


def _llama(calls: Calls, alone: bool) -> list[str]:
    objects = "object" + _more('"; " object', calls.parallel)
    lines = [_objects(calls.functions, "parameters")]
    if alone:
        return [*lines, f"calls: {objects}"]
    # What begins with a brace is a call.
    return [*lines, f"calls: {objects} | PLAIN", r"PLAIN: /([^{\s](?s:.*))?/"]


def _mistral(calls: Calls, mark: Mark, specials: Mapping[str, int], alone: bool) -> list[str]:
    opening = mark("[TOOL_CALLS]")
    if "[ARGS]" in specials:
        between = mark("[ARGS]")
        named = (f"{literal(name)} {between} {rule}" for name, rule in calls.functions.items())
        lines = ["body: " + "\n  | ".join(named)]
        more = _more(f"{opening} body", calls.parallel)
    else:
        objects = "object" + _more('", " object', calls.parallel)
        lines = [_objects(calls.functions, "arguments"), f'body: "[" {objects} "]"']
        more = ""
    if alone:
        return [*lines, f"calls: {opening} body{more}"]
    before = _text_up_to("[TOOL_CALLS]", specials)
    return [*lines, *before, f"calls: TEXT | before body{more}"]


def _objects(functions: Mapping[str, str], key: str) -> str:
    """The rule `object`: one call's JSON, its arguments by the function's own grammar."""
    choices = []
    for name, rule in functions.items():
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        choices.append(f"{literal(head)} {rule} {literal('}')}")
    return "object: " + "\n  | ".join(choices)


def _more(again: str, parallel: bool) -> str:
    return f" ({again})*" if parallel else ""


def _text_up_to(mark: str, specials: Mapping[str, int]) -> list[str]:
    """The rule `before`: any text and then the mark, which TEXT alone never holds."""
    if mark in specials:
        return ["TEXT: /(?s:.*)/", f"before: TEXT <[{specials[mark]}]>"]
    quoted = "".join(f"[{char}]" if char not in "[]^\\" else "\\" + char for char in mark)
    quoted = quoted.replace("/", "\\/")
    return [
        f"TEXT: /(?s:.*)/ & ~/(?s:.*){quoted}(?s:.*)/",
        f"before[lazy]: /(?s:.*){quoted}/",
    ]
