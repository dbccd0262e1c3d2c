"""JSON schemas of every keyword that is enforced, and of those that are refused.

The sizes of strings, arrays and objects are bounded where a keyword is not about having no bound:
a model with random weights does not know when to stop.
"""

from __future__ import annotations

import datetime
import enum
import uuid
from typing import Annotated, Any, Literal

import pydantic

Schema = dict[str, Any]

S: Schema = {"type": "string", "maxLength": 6}
I: Schema = {"type": "integer", "minimum": -20, "maximum": 20}  # noqa: E741
B: Schema = {"type": "boolean"}


def obj(properties: Schema, *required: str, **more: Any) -> Schema:
    base = {"type": "object", "properties": properties, "additionalProperties": False}
    return base | ({"required": list(required)} if required else {}) | more


def arr(items: Any, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, **more}


CONSTANTS: list[Any] = [
    *("", "a", "yes no", 'quote " and \\', "tab\tline\n", "grüße 한국 🙂", "</think>", "{}"),
    *(0, -1, 17, 1.5, -0.25, True, False, None),
    *([], [1, [2]], {}, {"a": {"b": [None]}}),
]
PATTERNS = [
    *("^[a-c]{2,4}$", "^x?y+z{2}$", "^(foo|ba[rz])$", "^[^a-z]{1,3}$", r"^\d{4}-\d{2}$"),
    *(r"^\w{3}$", r"^[A-Z][a-z]{0,5}$", "^$", "^(ab){2,3}$", "^é{1,2}ü$", r"^\(\d{3}\)$"),
    *(r"^[\w.]{1,5}@[a-z]{2,3}$", "^[Aa]b{0}c$", r"^a/b\\c$", '^"quoted"$', r"^(a|b|cd)*e$"),
]
FORMATS = [
    *("date-time", "time", "date", "duration", "email"),
    *("hostname", "ipv4", "ipv6", "uuid", "uri"),
]

STRINGS: list[Schema] = [
    *({"type": "string", "maxLength": n} for n in (0, 1, 2, 9)),
    *({"type": "string", "minLength": n, "maxLength": n + 3} for n in (1, 4, 8)),
    {"type": "string", "minLength": 5, "maxLength": 5},
    *({"type": "string", "pattern": pattern} for pattern in PATTERNS),
    {"type": "string", "pattern": "b", "maxLength": 4},
    {"type": "string", "pattern": "^a", "maxLength": 4},
    {"type": "string", "pattern": "^[ab]*$", "minLength": 2, "maxLength": 4},
    *({"type": "string", "format": name} for name in FORMATS),
]
NUMBERS: list[Schema] = [
    {"type": "integer", "minimum": 3, "maximum": 3},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "minimum": 95, "maximum": 1005},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "exclusiveMinimum": -3, "maximum": 0},
    {"type": "integer", "minimum": 1.5, "maximum": 4.5},
    {"type": "integer", "minimum": -1000, "maximum": -990},
    {"type": "integer", "minimum": 0},
    {"type": "integer", "maximum": -7},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "integer", "multipleOf": 5},
    {"type": "integer", "multipleOf": 1000, "minimum": -3000, "maximum": 3000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"type": "number", "exclusiveMinimum": 9.5, "maximum": 10.5},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.1},
    {"type": "number", "minimum": -4.25, "exclusiveMaximum": -4},
    {"type": "number", "minimum": 100},
    {"type": "number", "maximum": -0.5},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    {"type": "number", "multipleOf": 0.5},
    {"type": "number", "multipleOf": 3, "minimum": -9, "maximum": 9},
    {"type": "number"},
    {"type": "integer"},
    *({"type": "integer", "minimum": low, "maximum": low + 13} for low in (-107, -6, 88, 9994)),
    *({"type": "number", "minimum": low, "maximum": low + 0.75} for low in (-1.25, 0.5, 99.5)),
    *({"type": "number", "multipleOf": step, "minimum": 0, "maximum": 2} for step in (0.01, 0.1)),
]
VALUES: list[Schema] = [
    *({"const": value} for value in CONSTANTS),
    *({"enum": CONSTANTS[start : start + 3]} for start in range(0, len(CONSTANTS), 3)),
    {"enum": CONSTANTS},
    {"type": "string", "enum": ["a", "b", 3]},
    {"type": "null"},
    B,
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9},
    {"type": ["array", "null"], "items": B, "maxItems": 2},
    {"type": ["object", "string"], "maxLength": 3, "maxProperties": 0},
]
ARRAYS: list[Schema] = [
    *(arr(items) for items in (S, I, B, {"const": "x"}, {"enum": [1, "a"]})),
    *(arr(B, most) for most in (0, 1, 6)),
    *(arr(I, least + 2, minItems=least) for least in (1, 2, 5)),
    arr(S, 4, minItems=4),
    arr(arr(B, 2), 2),
    arr(arr(arr(I, 1, minItems=1), 2, minItems=1), 2),
    arr(obj({"a": I}, "a"), 2),
    {"type": "array", "prefixItems": [I, B], "items": False},
    {"type": "array", "prefixItems": [I, B], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [S], "items": B, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}, S], "minItems": 3, "maxItems": 3, "items": I},
    {"type": "array", "items": {"const": 0}, "maxItems": 2},
    {"type": "array", "items": False},
    {"type": "array", "uniqueItems": False, "items": B, "maxItems": 2},
    {"maxItems": 0, "type": "array"},
    *(arr({"type": "string", "format": name}, 2, minItems=1) for name in ("date", "uuid")),
    *(arr({"type": kind}, 2) for kind in ("null", "boolean", "integer", "number")),
]
NAMES = ["a b", 'q"q', "back\\slash", "grüße", "한", "new\nline", "$ref", "not", ""]
OBJECTS: list[Schema] = [
    obj({}),
    obj({"a": I}),
    obj({"a": I}, "a"),
    obj({"a": I, "b": S, "c": B}),
    obj({"a": I, "b": S, "c": B}, "b"),
    obj({"a": I, "b": S, "c": B}, "c", "a"),
    obj({"a": I, "b": S, "c": B}, "a", "b", "c"),
    *(obj({name: B}, name) for name in NAMES),
    obj(dict.fromkeys(NAMES, B), *NAMES),
    obj({"a": obj({"b": obj({"c": I}, "c")}, "b")}, "a"),
    obj({"a": arr(obj({"b": arr(B)}, "b"), 2)}, "a"),
    obj({"a": {"const": 1}, "b": False}, "a"),
    {"type": "object", "additionalProperties": I, "maxProperties": 2},
    {"type": "object", "additionalProperties": B, "minProperties": 1, "maxProperties": 3},
    {"type": "object", "properties": {"a": I}, "required": ["a"], "maxProperties": 1},
    {"type": "object", "required": ["z"], "additionalProperties": I, "maxProperties": 2},
    {"type": "object", "properties": {"a": B}, "required": ["a", "z"], "maxProperties": 2},
    obj({"a": I, "b": B}, "a", "b", additionalProperties=S, minProperties=3, maxProperties=3),
    obj({}, patternProperties={"^x_": I}, maxProperties=2),
    obj({}, patternProperties={"^x_": I, "^y_": B}, maxProperties=2),
    obj({"k": S}, "k", patternProperties={"^[0-9]{2}$": B}, maxProperties=3),
    {
        "type": "object",
        "patternProperties": {"^n": {"type": "null"}},
        "additionalProperties": {"const": 1},
        "maxProperties": 2,
    },
    {"type": "object", "maxProperties": 0},
    *(obj({"k": {"type": "string", "pattern": p}}, "k") for p in PATTERNS[:4]),
    *(obj({str(i): B for i in range(count)}) for count in (4, 9)),
]
TREE: Schema = {
    "$defs": {"node": obj({"v": B, "next": {"anyOf": [{"$ref": "#/$defs/node"}, B]}}, "v")},
    "$ref": "#/$defs/node",
}
COMBINED: list[Schema] = [
    {"anyOf": [I, S]},
    {"anyOf": [obj({"a": I}, "a"), obj({"b": S}, "b")]},
    {"anyOf": [{"type": "null"}, arr(B)]},
    {"type": "object", "anyOf": [obj({"a": B}, "a"), obj({"b": B}, "b")]},
    obj({"a": B, "b": B}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
    {"anyOf": [{"const": 1}, {"const": 2}, {"anyOf": [{"const": 3}, {"const": "x"}]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [{"type": "string", "pattern": "a"}, {"maxLength": 4}, {"minLength": 2}]},
    {"allOf": [{"type": "string", "pattern": "^[a-f]{4}$"}, {"pattern": "^.{2}c"}]},
    {"allOf": [obj({"a": B, "b": B}), {"required": ["a"]}]},
    {"allOf": [{"enum": [1, 2, 3, "a"]}, {"type": "integer", "minimum": 2}]},
    {"type": "array", "allOf": [{"items": B}, {"minItems": 1}, {"maxItems": 2}]},
    {"oneOf": [I, S]},
    {"oneOf": [{"type": "null"}, B, {"const": "x"}]},
    {
        "oneOf": [
            obj({"kind": {"const": "cat"}, "lives": I}, "kind", "lives"),
            obj({"kind": {"const": "dog"}, "loud": B}, "kind", "loud"),
        ]
    },
    {"$defs": {"n": I}, "$ref": "#/$defs/n"},
    {"definitions": {"n": S}, **arr({"$ref": "#/definitions/n"})},
    {"$defs": {"n": {"type": "integer", "minimum": 2}}, "$ref": "#/$defs/n", "maximum": 6},
    obj({"a": {"$ref": "#/properties/b"}, "b": B}, "a", "b"),
    {"$defs": {"a/b~c": B}, "$ref": "#/$defs/a~1b~0c"},
    {"$id": "http://it.test/s", "$defs": {"n": B}, **arr({"$ref": "#/$defs/n"})},
    TREE,
    obj({"self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "self"),
    obj({"more": arr({"$ref": "#"}, 1)}),
    {
        "$defs": {
            "even": {"anyOf": [{"const": 0}, arr({"$ref": "#/$defs/odd"}, 1, minItems=1)]},
            "odd": {"anyOf": [{"const": 1}, arr({"$ref": "#/$defs/even"}, 1, minItems=1)]},
        },
        "$ref": "#/$defs/even",
    },
]
ANNOTATED: list[Schema] = [
    {**I, "title": "t", "description": "d", "default": "not an integer", "examples": [{"not": 1}]},
    {**S, "deprecated": True, "readOnly": True, "writeOnly": True, "$comment": "c"},
    {**B, "$schema": "https://json-schema.org/draft/2020-12/schema"},
    {**B, "x-order": 3, "example": {"if": 1}, "nullable": False},
    obj({"a": {"type": "boolean", "title": "A"}}, "a", title="T", description="D"),
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": B},
        **obj({"a": {"$ref": "#/definitions/n"}}, "a"),
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [I, B],
        "additionalItems": False,
    },
    {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 6,
    },
]

Short = Annotated[str, pydantic.Field(max_length=5)]
Few = Annotated[int, pydantic.Field(ge=0, le=9)]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(pydantic.BaseModel):
    street: Short
    zip: Annotated[str, pydantic.Field(pattern="^[0-9]{5}$")]


class Person(pydantic.BaseModel):
    """A person"""

    name: Short
    age: Few | None = None
    address: Address
    others: Annotated[list[Address], pydantic.Field(max_length=1)] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    color: Color


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    when: datetime.datetime


class Zoo(pydantic.BaseModel):
    animals: Annotated[
        list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]],
        pydantic.Field(max_length=2),
    ]


class Simple(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    id: uuid.UUID
    day: datetime.date
    pair: tuple[Few, Color]
    share: Annotated[float, pydantic.Field(gt=0, lt=1)]
    counts: Annotated[dict[str, Few], pydantic.Field(max_length=2)]
    either: Few | Short | bool


MODELS: list[Schema] = [m.model_json_schema() for m in (Address, Person, Cat, Dog, Zoo, Simple)]


def closed(schema: Any) -> Any:
    """Objects without unbounded further properties, as the client's own helper makes them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {name: closed(each) for name, each in schema.items()}
    if "properties" in copy and "type" in copy:
        copy.setdefault("additionalProperties", False)
    return copy


SUPPORTED: dict[str, list[Schema]] = {
    "strings": STRINGS,
    "numbers": NUMBERS,
    "values": VALUES,
    "arrays": ARRAYS,
    "objects": OBJECTS,
    "combined": COMBINED,
    "annotated": ANNOTATED,
    "models": [closed(model) for model in MODELS],
}

REFUSED: list[tuple[str, Schema]] = [
    ("not", {"not": {"type": "string"}}),
    ("if", {"if": {"type": "string"}}),
    ("then", {"then": {"maxLength": 3}}),
    ("else", {"else": {"maxLength": 3}}),
    ("contains", {"type": "array", "contains": B}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("maxContains", {"type": "array", "maxContains": 1}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("$dynamicRef", {"$dynamicRef": "#node"}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("contentEncoding", {"type": "string", "contentEncoding": "base64"}),
    ("contentMediaType", {"type": "string", "contentMediaType": "text/html"}),
    ("contentSchema", {"type": "string", "contentSchema": B}),
    ("format", {"type": "string", "format": "regex"}),
    ("format", {"type": "string", "format": "no-such"}),
    ("pattern", {"type": "string", "pattern": "^(?=a)b$"}),
    ("pattern", {"type": "string", "pattern": r"^(a)\1$"}),
    ("pattern", {"type": "string", "pattern": "("}),
    ("oneOf", {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}),
    ("patternProperties", {"type": "object", "patternProperties": {"^a": B, "^ab": I}}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("minProperties", {"type": "object", "properties": {"a": B, "b": B}, "minProperties": 1}),
    ("multipleOf", {"type": "integer", "multipleOf": 123457}),
    ("$ref", {"$ref": "https://elsewhere.test/schema"}),
    ("$ref", {"$ref": "#/$defs/missing"}),
    ("type", {"type": "text"}),
    ("enum", {"enum": []}),
    ("const", {"const": "\x00"}),
    ("required", {"type": "object", "required": "a"}),
    ("properties", {"type": "object", "properties": ["a"]}),
    ("minLength", {"type": "string", "minLength": 3, "maxLength": 2}),
    ("minimum", {"type": "integer", "minimum": 3, "maximum": 2}),
]
