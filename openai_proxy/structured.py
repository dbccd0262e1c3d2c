"""What an answer must look like: OpenAI's and vLLM's fields -> a grammar of `tridentlm.grammar`.

response_format     {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema"}}
structured_outputs  {"json" | "regex" | "choice" | "grammar" | "json_object": ...}
guided_json ...     the same by vLLM's old names
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from tridentlm import grammar
from tridentlm.errors import InvalidRequest

_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_GUIDED = {f"guided_{name}": kind for name, kind in _KINDS.items()}
FIELDS = frozenset({"response_format", "structured_outputs", *_GUIDED})

# A grammar takes up to 0.1 s: beside the event loop, and no more than a core or two in all.
_CHECKERS = ThreadPoolExecutor(2, thread_name_prefix="grammar")


@dataclass(frozen=True, slots=True)
class Wanted:
    """`param` is the field that asked for `grammar`."""

    grammar: dict[str, Any]
    param: str


def wanted_of(body: Mapping[str, Any]) -> Wanted | None:
    """The form that the body asks for; None: plain text. Raises InvalidRequest."""
    found = [
        Wanted(form, name)
        for name in sorted(FIELDS & body.keys())
        if body[name] is not None and (form := _form(name, body[name])) is not None
    ]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].param} and {found[1].param} exclude each other.", param=found[1].param
        )
    return found[0] if found else None


async def check(wanted: Wanted) -> None:
    """Raises InvalidRequest, blaming the field, unless answers can be held to the grammar."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(_CHECKERS, grammar.check, wanted.grammar, wanted.param)


def _form(name: str, value: Any) -> dict[str, Any] | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return {"type": _GUIDED[name], "value": _parsed(name, value)}


def _response_format(value: Any) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format must be of type text, json_object or json_schema.",
            param="response_format",
        )
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), (dict, bool)):
        raise InvalidRequest(
            "response_format.json_schema must be an object with a schema.",
            param="response_format.json_schema",
        )
    return {"type": "json_schema", "value": inner["schema"]}


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object.", param=name)
    given = {key: each for key, each in value.items() if each is not None and each is not False}
    for key in given:
        if key not in (*_KINDS, "json_object"):
            raise InvalidRequest(
                f"{name}.{key} is not supported by this server.",
                param=f"{name}.{key}",
                code="unsupported_parameter",
            )
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(f"{name} takes one of {', '.join(given)}.", param=name)
    [(key, each)] = given.items()
    if key == "json_object":
        return {"type": "json_object"}
    return {"type": _KINDS[key], "value": _parsed(f"{name}.{key}", each)}


def _parsed(name: str, value: Any) -> Any:
    """A schema may come as JSON text."""
    if not name.endswith("json") or not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}.", param=name) from None
