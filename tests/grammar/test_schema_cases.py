"""Every answer of a model with random weights fits its schema; what cannot be enforced is refused.

Such a model seldom closes a string or a list by itself: what closes them has a logit bias, and the
schemas bound their sizes, so that each answer ends within MAX_TOKENS.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import urllib.parse
import uuid
from collections.abc import Callable
from typing import Any

import jsonschema
import orjson
import pytest

from tests.grammar.schema_cases import REFUSED, SUPPORTED
from tridentlm import LLM, SamplingParams, grammar
from tridentlm.errors import InvalidRequest
from tridentlm.llm import Completion

CASES = [
    pytest.param(schema, id=f"{group}-{i}")
    for group, schemas in SUPPORTED.items()
    for i, schema in enumerate(schemas)
]
SCHEMAS: list[Any] = [case.values[0] for case in CASES]
SEEDS = (1, 2)
MAX_TOKENS = 600
CLOSING = '"]}, '
FORMATS = jsonschema.FormatChecker(formats=())

Answers = dict[str, list[Completion]]


def test_there_are_two_hundred_cases() -> None:
    assert len(SCHEMAS) >= 200
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS)


@pytest.fixture(scope="module")
def answers(llm: LLM) -> Answers:
    """Those to all cases, generated together."""
    bias = tuple((llm.tokenizer.encode(mark)[0], 4.0) for mark in CLOSING)
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            seed=seed,
            logit_bias=bias,
            grammar={"type": "json_schema", "value": schema},
        )
        for schema in SCHEMAS
        for seed in SEEDS
    ]
    found = llm.generate(["Answer:"] * len(params), params)
    step = len(SEEDS)
    return {
        json.dumps(schema): found[step * i : step * (i + 1)] for i, schema in enumerate(SCHEMAS)
    }


@pytest.mark.parametrize("schema", CASES)
def test_every_answer_parses_and_validates(answers: Answers, schema: dict[str, Any]) -> None:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    for answer in answers[json.dumps(schema)]:
        assert answer.finish_reason == "stop", answer.text
        value = orjson.loads(answer.text)
        kind(schema, format_checker=FORMATS).validate(value)


@pytest.mark.parametrize(("keyword", "schema"), REFUSED)
@pytest.mark.parametrize("nested", [False, True])
def test_what_cannot_be_enforced_is_refused(
    keyword: str, schema: dict[str, Any], nested: bool
) -> None:
    if nested:
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(InvalidRequest) as caught:
        grammar.check({"type": "json_schema", "value": schema})
    assert caught.value.param == "grammar"
    assert caught.value.code in ("unsupported_keyword", "invalid_grammar")


def _accepts(read: Callable[[str], Any]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return not isinstance(value, str) or read(value) not in (None, False)

    return check


def _time(text: str) -> bool:
    matched = re.fullmatch(r"(\d\d:\d\d):(\d\d)(\.\d+)?([zZ]|[+-]\d\d:\d\d)", text)
    if matched is None or int(matched[2]) > 60:  # a leap second has number 60
        return False
    zone = "+00:00" if matched[4] in "zZ" else matched[4]
    datetime.time.fromisoformat(matched[1] + zone)
    return True


def _date_time(text: str) -> bool:
    datetime.date.fromisoformat(text[:10])
    return text[10] in "tT" and _time(text[11:])


def _uri(text: str) -> bool:
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text)) and urllib.parse.urlsplit(text) != ""


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_DURATION = r"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)"
_READERS: dict[str, Callable[[str], Any]] = {
    "date-time": _date_time,
    "time": _time,
    "date": datetime.date.fromisoformat,
    "duration": re.compile(_DURATION).fullmatch,
    "email": re.compile(r"[^@\s]+@[^@\s]+").fullmatch,
    "hostname": re.compile(rf"{_LABEL}(\.{_LABEL})*").fullmatch,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": _uri,
}
for _name, _reader in _READERS.items():
    FORMATS.checks(_name, raises=ValueError)(_accepts(_reader))
