from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tridentlm.core.request import SamplingParams
from tridentlm.errors import InvalidRequest
from tridentlm.text.stops import StopChecker

ALPHABET = "abc\n"


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the match that ends first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(checker: StopChecker, pieces: list[str]) -> str:
    return "".join([checker.push(piece) for piece in pieces]) + checker.flush()


@settings(max_examples=1500, deadline=None)
@given(
    pieces=st.lists(st.text(ALPHABET, max_size=6), max_size=12),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=5),
)
def test_text_before_the_first_match_comes_out_exactly(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    text = run(checker, pieces)
    assert (text, checker.matched) == expected("".join(pieces), stops)


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text(ALPHABET, max_size=6), max_size=12),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=5),
)
def test_exactly_the_longest_possible_stop_prefix_is_held(
    pieces: list[str], stops: list[str]
) -> None:
    checker = StopChecker(stops)
    emitted, seen = "", ""
    for piece in pieces:
        emitted += checker.push(piece)
        seen += piece
        if checker.matched is not None:
            break
        held = max(
            n
            for n in range(len(seen) + 1)
            if any(s.startswith(seen[len(seen) - n :]) for s in stops)
        )
        assert emitted == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["END"], ["a E", "N", "D b"], "a ", "END"),
        (["END"], ["a E", "N", "E", "ND"], "a EN", "END"),
        (["ab", "abc"], ["xab", "c"], "x", "ab"),
        (["abcd", "bc"], ["xabcd"], "xa", "bc"),
        (["bc", "abc"], ["xabc"], "x", "abc"),
        (["aab"], ["aaaab"], "aa", "aab"),
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo", "\n\n"),
        (["世界"], ["你好世", "界!"], "你好", "世界"),
        (["🚀"], ["go ", "🚀", " far"], "go ", "🚀"),
        (["stop"], ["no match, sto"], "no match, sto", None),
        (["a", "a"], ["ba"], "b", "a"),
    ],
)
def test_known_cases(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    checker = StopChecker(stops)
    assert run(checker, pieces) == text
    assert checker.matched == matched


def test_nothing_comes_after_a_match() -> None:
    checker = StopChecker(["END"])
    assert checker.push("a END b") == "a "
    assert checker.push("more") == ""
    assert checker.push("E") == ""
    assert checker.flush() == ""
    assert checker.matched == "END"


def test_long_stops_and_texts_take_linear_time() -> None:
    """A text that all but matches, again and again: a rescan would take 10**10 steps."""
    stop = "a" * 1000 + "b"
    checker = StopChecker([stop])
    emitted = sum(len(checker.push("a" * 10)) for _ in range(10_000))
    assert emitted == 100_000 - 1000
    assert len(checker.flush()) == 1000


def test_stop_strings_that_would_be_costly_to_prepare_are_refused() -> None:
    accepted = SamplingParams.from_mapping({"stop": ["a" * 1000] * 16})
    assert StopChecker(accepted.stop).push("b") == "b"
    with pytest.raises(InvalidRequest, match="1000"):
        SamplingParams.from_mapping({"stop": "a" * 1001})
