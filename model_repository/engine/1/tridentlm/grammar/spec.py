"""What an answer must look like: the tagged value of `SamplingParams.grammar`.

    {"type": "json_object"}                                    any JSON object
    {"type": "json_schema", "value": schema}                   JSON of that schema
    {"type": "regex", "value": "..."}                          the whole answer matches
    {"type": "choice", "value": ["yes", "no"]}                 one of these texts
    {"type": "grammar", "value": "..."}                        Lark, or llama.cpp's GBNF
    {"type": "tool_calls", "value": {"format", "functions": [{"name", "parameters"}...],
        "parallel", "required", "otherwise"}}     see `calls`; `otherwise` is one of the above

and, beside them, `thoughts`: "open" when the prompt ends inside <think>, "maybe" when the model may
begin with it; the grammar then holds from behind </think> on.

    SamplingParams.grammar --check()--> 400, or --JSON text--> engine: source() -> LLMatcher
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tridentlm.errors import InvalidRequest
from tridentlm.grammar import calls, schemas

PARAM = "grammar"
MAX_SPEC_CHARS = 262_144
MAX_CHARS = 16384
MAX_RULES = 256
MAX_CHOICES = 1024
MAX_FUNCTIONS = 512
CHECKED = 256
"""Verdicts that are remembered."""

LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)

# One space or line break, with indentation, at each place: nobody can fill an answer with blanks.
_WHITESPACE = r"(\x20|\r?\n[\x20\x09]{0,64})"
_JSON_OPTIONS = {
    "whitespace_pattern": _WHITESPACE,
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
    "coerce_one_of": False,
}
_META = re.compile(r"[][\\.+*?()|{}^$#&~/-]")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_UNSUPPORTED = re.compile(
    "Unknown format|oneOf constraints|patternProperty regexes|min/maxProperties"
)
_GAP = r"GAP: /[ \r\n]{0,4}/"


def check(spec: Any, param: str = PARAM) -> None:
    """Raises InvalidRequest unless answers can be held to `spec`. `param` is what errors blame.

    Takes 1 to 100 ms, mostly without Python's lock. What was checked lately is remembered.
    """
    verdict = _verdict(dumped(spec))
    if verdict is not None:
        message, code = verdict
        raise InvalidRequest(message, param=param, code=code)


def dumped(spec: Any) -> str:
    """The spec as text, which keeps the order of properties. Raises InvalidRequest."""
    try:
        return json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"grammar is no JSON value: {error}.", param=PARAM) from None


@functools.lru_cache(CHECKED)
def _verdict(text: str) -> tuple[str, str | None] | None:
    if len(text) > MAX_SPEC_CHARS:
        return f"The grammar has more than {MAX_SPEC_CHARS} characters.", "invalid_grammar"
    try:
        matcher = LLMatcher(_bytes_tokenizer(), source(text, {}), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise refusal(matcher.get_error())
    except InvalidRequest as error:
        return error.message, error.code
    return None


def refusal(error: str) -> InvalidRequest:
    """The compiler's error as ours."""
    code = "unsupported_keyword" if _UNSUPPORTED.search(error) else "invalid_grammar"
    unimplemented = _UNIMPLEMENTED.search(error)
    if unimplemented:
        keyword = ", ".join(json.loads(unimplemented[1]))
        return InvalidRequest(
            f"JSON schema keywords that cannot be enforced: {keyword}.",
            param=PARAM,
            code="unsupported_keyword",
        )
    if "NoExtension" in error:
        error = "nothing matches it"
    if "oneOf constraints" in error:
        error = "oneOf is supported where it is plain that two branches never hold at once"
    return InvalidRequest(
        f"The grammar cannot be used: {' '.join(error.split())[:400]}",
        param=PARAM,
        code=code,
    )


def source(text: str, specials: Mapping[str, int]) -> str:
    """llguidance's form of a spec's JSON text. `specials`: ids of the tokenizer's special tokens.

    Raises InvalidRequest for what is no spec.
    """
    spec = json.loads(text)

    def mark(name: str) -> str:
        return f"<[{specials[name]}]>" if name in specials else calls.literal(name)

    body, others = _body(spec, mark, specials)
    thoughts = spec.get("thoughts")
    if thoughts is None:
        return json.dumps({"grammars": [body, *others]})
    if thoughts not in ("open", "maybe"):
        raise _wrong('thoughts must be "open" or "maybe".')
    first = {"name": "answer", "lark_grammar": _after_thoughts(thoughts, mark, specials)}
    return json.dumps({"grammars": [first, {**body, "name": "body"}, *others]})


def _body(spec: Any, mark: calls.Mark, specials: Mapping[str, int]) -> Body:
    kind = spec.get("type") if isinstance(spec, dict) else None
    if not isinstance(kind, str) or kind not in _BODIES:
        raise _wrong(f"grammar must be an object whose type is one of {', '.join(_BODIES)}.")
    return _BODIES[kind](spec.get("value"), mark, specials)


def _after_thoughts(thoughts: str, mark: calls.Mark, specials: Mapping[str, int]) -> str:
    if "</think>" in specials:
        thought = f"thought: /(?s:.*)/ {mark('</think>')}"
    else:
        thought = r"thought[lazy]: /(?s:.*)<\/think>/"
    if thoughts == "open":
        start = "start: thought GAP @body"
    else:
        start = f"start: ({mark('<think>')} thought GAP)? @body"
    return "\n".join([start, thought, _GAP]) + "\n"


Body = tuple[dict[str, Any], list[dict[str, Any]]]
"""The grammar of the answer and those that it refers to by name."""


def _json_object(value: Any, mark: calls.Mark, specials: Mapping[str, int]) -> Body:
    return _json_schema({"type": "object"}, mark, specials)


def _json_schema(value: Any, mark: calls.Mark, specials: Mapping[str, int]) -> Body:
    schema = schemas.prepared(value, PARAM)
    return {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}, []


def _regex(value: Any, mark: calls.Mark, specials: Mapping[str, int]) -> Body:
    return {"lark_grammar": f"start: /{regex_to_lark(_text(value, 'regex'), '')}/"}, []


def _choice(value: Any, mark: calls.Mark, specials: Mapping[str, int]) -> Body:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise _wrong(f"choice must be a list of 1 to {MAX_CHOICES} strings.")
    if not all(isinstance(each, str) for each in value) or sum(map(len, value)) > MAX_CHARS:
        raise _wrong(f"choice must hold strings of {MAX_CHARS} characters in all.")
    pattern = "|".join(_META.sub(r"\\\g<0>", each).replace("\n", "\\n") for each in value)
    return {"lark_grammar": f"start: /{pattern}/"}, []


def _grammar(value: Any, mark: calls.Mark, specials: Mapping[str, int]) -> Body:
    text = _text(value, "grammar")
    if sum(":" in line for line in text.splitlines()) > MAX_RULES:
        raise _wrong(f"grammar has more than {MAX_RULES} rules.")
    try:
        return {"lark_grammar": any_to_lark(text)}, []
    except Exception as error:  # the converter's own kinds, RecursionError among them
        raise _wrong(f"The grammar is neither Lark nor GBNF: {error}") from None


def _tool_calls(value: Any, mark: calls.Mark, specials: Mapping[str, int]) -> Body:
    if not isinstance(value, dict) or value.get("format") not in calls.FORMATS:
        raise _wrong(f"tool_calls needs a format: {', '.join(calls.FORMATS)}.")
    functions = value.get("functions")
    if not isinstance(functions, list) or not 1 <= len(functions) <= MAX_FUNCTIONS:
        raise _wrong(f"tool_calls needs 1 to {MAX_FUNCTIONS} functions.")
    rules: dict[str, str] = {}
    others: list[dict[str, Any]] = []
    for i, function in enumerate(functions):
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong("Each of the functions needs a name.")
        schema = function.get("parameters") or _NO_PARAMETERS
        if isinstance(schema, dict):
            schema = {"type": "object", **schema}
        try:
            body, _ = _json_schema(schema, mark, specials)
        except InvalidRequest as error:
            message = f"The parameters of {function['name']!r}: {error.message}"
            raise InvalidRequest(message, param=PARAM, code=error.code) from None
        rules[function["name"]] = f"@arguments{i}"
        others.append({**body, "name": f"arguments{i}"})
    otherwise = value.get("otherwise")
    if otherwise is not None and value["format"] == "llama3_json" and not value.get("required"):
        raise _wrong(
            "This model's tool calls cannot be told from other JSON: ask for either alone."
        )
    if otherwise is not None:
        body, more = _body(otherwise, mark, specials)
        others += [{**body, "name": "otherwise"}, *more]
    wanted = calls.Calls(
        functions=rules,
        parallel=bool(value.get("parallel")),
        required=bool(value.get("required")),
        otherwise=None if otherwise is None else "@otherwise",
    )
    return {"lark_grammar": calls.rules(value["format"], wanted, mark, specials)}, others


_NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
_BODIES = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "tool_calls": _tool_calls,
}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CHARS:
        raise _wrong(f"{name} must be a text of 1 to {MAX_CHARS} characters.")
    return value


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=PARAM, code="invalid_grammar")


class _Bytes:
    """A vocabulary of single bytes, enough to compile against."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
