"""What a grammar's tagged value means, and which values are refused."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.grammar.walks import accepts
from tests.text.families import FAMILIES
from tridentlm.errors import InvalidRequest
from tridentlm.grammar import check
from tridentlm.grammar.spec import source
from tridentlm.text import Tokenizer

KINDS = ["json_object", "json_schema", "regex", "choice", "grammar", "tool_calls"]
JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (JSON, ['{"a": [1, null]}', "{}", '{\n  "a": "é"\n}'], ["[]", "1", " {}", "{} ", '{"a"}']),
        ({"type": "json_schema", "value": True}, ["1", "[]", '"a"'], ["", "a"]),
        ({"type": "regex", "value": "a+/b"}, ["a/b", "aaa/b"], ["a/bb", "xa/b", ""]),
        ({"type": "regex", "value": "^(é|x)$"}, ["é", "x"], ["^x$", "éx"]),
        (
            {"type": "choice", "value": ["a", "ab", "", "x.y", "a/b\n"]},
            ["a", "ab", "", "x.y", "a/b\n"],
            ["b", "x-y", "aab"],
        ),
        ({"type": "grammar", "value": 'start: "a" B?\nB: /[0-9]{2}/'}, ["a", "a12"], ["a1", "12"]),
        (
            {"type": "grammar", "value": "root ::= [a-c]+ x\nx ::= ('!')?".replace("'", '"')},
            ["ab!", "c"],
            ["!"],
        ),
    ],
)
def test_what_is_an_answer(spec: Any, good: list[str], bad: list[str]) -> None:
    check(spec)
    assert [text for text in good if not accepts(spec, text)] == []
    assert [text for text in bad if accepts(spec, text)] == []


def test_blanks_within_json_are_few_and_escapes_plain() -> None:
    assert accepts(JSON, '{\n\t\t"a" : 1 ,\r\n  "b":2}')
    assert not accepts(JSON, '{  "a": 1}')
    assert not accepts(JSON, '{\n\n"a": 1}')
    assert accepts(JSON, r'{"a": "\n\"\\"}')
    assert not accepts(JSON, r'{"a": "\ud800"}')


@pytest.mark.parametrize("specials", [(), ("<think>", "</think>")])
def test_the_form_begins_behind_thoughts(specials: tuple[str, ...]) -> None:
    opened, maybe = ({**JSON, "thoughts": thoughts} for thoughts in ("open", "maybe"))
    for text in ("</think>{}", "Hm, {1\n</think>\n\n{}"):
        assert accepts(opened, text, specials)
        assert accepts(maybe, f"<think>{text}", specials)
    for text in ("{}", "thoughts", "</think>", "</think>x", "a</think>{}{}"):
        assert not accepts(opened, text, specials)
    assert accepts(maybe, "{}", specials)
    assert not accepts(maybe, "Hm</think>{}", specials)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({}, "type"),
        ([], "type"),
        ({"type": "xml"}, "json_schema"),
        ({**JSON, "thoughts": "many"}, "thoughts"),
        ({"type": "json_schema"}, "object"),
        ({"type": "json_schema", "value": False}, "object"),
        ({"type": "json_schema", "value": {"enum": ["x" * 70_000]}}, "65536"),
        ({"type": "json_schema", "value": {"enum": list(range(600))}}, "enum"),
        ({"type": "json_schema", "value": {"$ref": "#"}}, "nothing"),
        ({"type": "regex", "value": ""}, "1 to"),
        ({"type": "regex", "value": 3}, "text"),
        ({"type": "regex", "value": "(?<=a)b"}, "look"),
        ({"type": "regex", "value": "a" * 20_000}, "16384"),
        ({"type": "choice", "value": ["a", 1]}, "strings"),
        ({"type": "choice", "value": "ab"}, "list"),
        ({"type": "choice", "value": ["a"] * 2000}, "1024"),
        ({"type": "grammar", "value": "start: nothing"}, "nothing"),
        ({"type": "grammar", "value": "start: <|im_end|>"}, "special token"),
        ({"type": "grammar", "value": "root ::= " + "(" * 3000}, "GBNF"),
        ({"type": "grammar", "value": "start: " + "(" * 3000}, "nested"),
        ({"type": "grammar", "value": "start: a\n" + "a: b\n" * 300}, "256"),
        ({"type": "tool_calls", "value": {"format": "xml"}}, "hermes"),
        ({"type": "tool_calls", "value": {"format": "hermes", "functions": []}}, "functions"),
        ({"type": "tool_calls", "value": {"format": "hermes", "functions": [3]}}, "name"),
        (
            {
                "type": "tool_calls",
                "value": {
                    "format": "hermes",
                    "functions": [{"name": "f", "parameters": {"not": {}}}],
                },
            },
            "'f'",
        ),
    ],
)
def test_what_is_none_is_refused_with_the_reason(spec: Any, named: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequest, match=None) as caught:
            check(spec, "response_format")
        assert caught.value.param == "response_format"
        assert caught.value.code in ("invalid_grammar", "unsupported_keyword")
        assert named in caught.value.message


KEYWORDS = [
    *("type", "properties", "items", "anyOf", "oneOf", "allOf", "enum", "const", "$ref", "$defs"),
    *("required", "additionalProperties", "prefixItems", "minimum", "exclusiveMinimum", "maximum"),
    *("multipleOf", "minLength", "maxLength", "pattern", "format", "minItems", "uniqueItems"),
    *("minProperties", "maxProperties", "patternProperties", "value", "thoughts", "format", "not"),
    *("functions", "parameters", "name", "otherwise"),
]
WORDS = st.sampled_from(
    ["string", "object", "array", "#/$defs/a", "#", "^a$", "date", "hermes", ""]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | WORDS | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORDS) | st.text(max_size=2), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from([*KINDS, "nothing"]) | ANYTHING, ANYTHING, st.none() | ANYTHING)
def test_nothing_else_comes_of_any_value(kind: Any, value: Any, thoughts: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        check({"type": kind, "value": value, "thoughts": thoughts})
    with contextlib.suppress(InvalidRequest):
        check({"type": "tool_calls", "value": {"format": "hermes", "functions": value}})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(200),
        {"const": json.loads("[" * 200 + "]" * 200)},
        {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)},
            "$ref": "#/$defs/d0",
        },
        {"type": "integer", "multipleOf": 1234567},
        {"anyOf": [{"const": i} for i in range(5000)]},
    ],
    ids=["deep", "deep constant", "chain of references", "multiple", "many branches"],
)
def test_what_would_cost_the_compiler_too_much_is_refused_at_once(schema: Any) -> None:
    started = time.thread_time()  # what others compute meanwhile does not count
    with pytest.raises(InvalidRequest):
        check({"type": "json_schema", "value": schema})
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("family", ["byte-level", "qwen", "llama-3", "llama-2", "gemma"])
def test_the_text_of_what_is_allowed_is_an_answer_for_every_tokenizer(family: str) -> None:
    tokenizer = Tokenizer(FAMILIES[family]())
    eos = tokenizer.special_ids["</s>"]
    size = tokenizer.vocab_size + 9  # models pad their vocabulary
    vocabulary = LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=[eos])
    schema = {
        "type": "object",
        "properties": {"a b": {"type": "string", "maxLength": 8}, "n": {"enum": [1, "é한😀"]}},
        "required": ["a b", "n"],
        "additionalProperties": False,
    }
    compiled = source(json.dumps({"type": "json_schema", "value": schema}), tokenizer.special_ids)
    for seed in range(10):
        rng, ids = np.random.default_rng(seed), []
        place = LLMatcher(vocabulary, compiled)
        while True:
            octets = np.frombuffer(place.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(octets, bitorder="little"))
            token = int(rng.choice(allowed))
            assert token < tokenizer.vocab_size
            if token == eos:
                break
            place.consume_token(token)
            ids.append(token)
        value = json.loads(tokenizer.decode(ids))
        assert value["n"] in (1, "é한😀")
        assert len(value["a b"]) <= 8
