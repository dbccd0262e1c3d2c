"""JSON schemas that the grammar compiler can enforce to the letter, and clear refusals of others.

The compiler (llguidance) refuses most keywords that it does not enforce; what it takes but does not
hold in every answer is refused here, before it, and so is what would cost it too much.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

from tridentlm.errors import InvalidRequest

MAX_SCHEMA_CHARS = 65536
MAX_DEPTH = 64
MAX_REFERENCES = 512
MAX_BRANCHES = 512
MAX_MULTIPLE = 10_000
"""Significant digits of a multipleOf, as a number: the compiler makes a state of each remainder."""

REFUSED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
NEXT = 1e-9
_BOUNDS = (
    ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_ESCAPED = "\b\t\n\f\r"


def prepared(schema: Any, param: str) -> dict[str, Any]:
    """The schema as the compiler takes it. `param` is what errors blame.

    Raises InvalidRequest with the code `unsupported_keyword`, naming keyword and place, for what
    cannot be enforced, and with `invalid_grammar` for what is no schema or too large.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refusal(param, "A JSON schema must be an object.")
    if _depth(schema) > MAX_DEPTH:
        raise _refusal(param, f"The schema is nested more than {MAX_DEPTH} levels deep.")
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_CHARS:
        raise _refusal(param, f"The schema has {size} characters; {MAX_SCHEMA_CHARS} are allowed.")
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    references = set()
    for place, part in _parts(copy, ""):
        _check_keywords(part, place, param)
        _check_strings(part, place, param)
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        _shift_bounds(part)
        references.add(str(part.get("$ref")))
    if len(references) > MAX_REFERENCES:
        raise _refusal(param, f"The schema refers to more than {MAX_REFERENCES} others.")
    return copy


def unsupported(param: str, keyword: str, place: str, reason: str = "") -> InvalidRequest:
    where = place or "the top level"
    reason = reason or "it cannot be enforced"
    return InvalidRequest(
        f"The JSON schema keyword {keyword!r} at {where} is not supported: {reason}.",
        param=param,
        code="unsupported_keyword",
    )


def _refusal(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_grammar")


def _depth(value: Any) -> int:
    """How deep lists and objects lie in one another, MAX_DEPTH + 1 at most."""
    level = [value]
    for depth in range(MAX_DEPTH + 1):
        inner = [i for i in level if isinstance(i, (dict, list))]
        if not inner:
            return depth
        level = [v for i in inner for v in (i.values() if isinstance(i, dict) else i)]
    return MAX_DEPTH + 1


def _parts(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within `schema`, itself first, with the path to it."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for name in _MAPS:
        inner = schema.get(name)
        if isinstance(inner, dict):
            for key, each in inner.items():
                yield from _parts(each, f"{place}/{name}/{key}")
    for name in (*_LISTS, "items", "additionalProperties", "additionalItems"):
        inner = schema.get(name)
        if isinstance(inner, list):
            for i, each in enumerate(inner):
                yield from _parts(each, f"{place}/{name}/{i}")
        else:
            yield from _parts(inner, f"{place}/{name}")


def _check_keywords(part: dict[str, Any], place: str, param: str) -> None:
    for keyword in part:
        if keyword in REFUSED:
            raise unsupported(param, keyword, place)
    if part.get("uniqueItems"):
        raise unsupported(param, "uniqueItems", place)
    for name in (*_LISTS, "enum"):
        if isinstance(part.get(name), list) and len(part[name]) > MAX_BRANCHES:
            raise _refusal(param, f"{name} at {place or 'the top level'} is too long.")
    multiple = part.get("multipleOf")
    if _is_number(multiple):
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) > MAX_MULTIPLE:
            raise unsupported(param, "multipleOf", place, f"{multiple} has too many digits")
    least = part.get("minProperties")
    required = part.get("required")
    if isinstance(least, int) and least > 1 + len(required if isinstance(required, list) else ()):
        # The grammar counts properties, and does not see that a name comes twice.
        raise unsupported(
            param, "minProperties", place, "at most one more than the required properties can be"
        )


def _shift_bounds(part: dict[str, Any]) -> None:
    """llguidance 1.9 lets 0 pass for 0 < x <= 0.5: any whole exclusive bound whose other bound has
    the same whole part. There the bound becomes an inclusive one by its side."""
    for exclusive, inclusive, others, sign in _BOUNDS:
        bound = part.get(exclusive)
        for other in (part.get(name) for name in others):
            if not _is_number(bound) or not _is_number(other) or bound % 1:
                continue
            if sign * bound >= 0 and 0 < sign * (other - bound) < 1:
                shifted = bound + sign * NEXT
                stricter = max if sign > 0 else min
                part[inclusive] = stricter(shifted, part.get(inclusive, shifted))
                part.pop(exclusive, None)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_strings(part: dict[str, Any], place: str, param: str) -> None:
    """Answers never hold \\u escapes (a lone surrogate breaks strict parsers), so some characters
    cannot be written."""
    names = part.get("properties")
    fixed = [part.get("const"), part.get("enum"), list(names) if isinstance(names, dict) else ()]
    for text in _texts(fixed):
        if any(char < " " and char not in _ESCAPED for char in text):
            where = place or "the top level"
            raise _refusal(param, f"A fixed text at {where} holds control codes.")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
