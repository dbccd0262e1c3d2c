"""Ways through a grammar without a model, a byte or special token at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tridentlm.grammar.spec import LIMITS, source

EOS = 256
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
SPECIAL_IDS = {mark: EOS + 1 + i for i, mark in enumerate(MARKS)}
CLOSING = frozenset(b'"}]<>')


class _Vocabulary:
    eos_token_id, bos_token_id = EOS, None
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>", *(mark.encode() for mark in MARKS))
    special_token_ids = (EOS, *SPECIAL_IDS.values())

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(_Vocabulary()), slices=[])


def matcher(spec: Any, specials: Sequence[str] = ()) -> LLMatcher:
    """`specials`: those of MARKS that are special tokens; the others are text."""
    ids = {mark: SPECIAL_IDS[mark] for mark in specials}
    made = LLMatcher(TOKENIZER, source(json.dumps(spec), ids), log_level=0, limits=LIMITS)
    assert not made.is_error(), made.get_error()
    return made


def accepts(spec: Any, text: str, specials: Sequence[str] = ()) -> bool:
    """Whether the whole text is an answer."""
    place = matcher(spec, specials)
    ids: list[int] = []
    while text:
        mark = next((mark for mark in specials if text.startswith(mark)), None)
        ids += [SPECIAL_IDS[mark]] if mark else text[0].encode()
        text = text[len(mark or text[0]) :]
    return place.validate_tokens([*ids, EOS]) == len(ids) + 1


def walk(spec: Any, seed: int, specials: Sequence[str] = (), steps: int = 1500) -> str | None:
    """A random answer, with a liking for what closes something; None if it does not come to an
    end."""
    place, rng, text = matcher(spec, specials), random.Random(seed), b""
    for _ in range(steps):
        bits = np.unpackbits(np.frombuffer(place.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, place.get_error()
        likely = [token for token in allowed if token >= EOS or token in CLOSING]
        token = rng.choice(likely if likely and rng.random() < 0.3 else allowed)
        if token == EOS:
            return text.decode()
        place.consume_token(token)
        text += _Vocabulary.tokens[token]
    return None
