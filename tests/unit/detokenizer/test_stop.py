"""Stop strings are found wherever the borders of tokens lie."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.detokenizer.choice import StopMatch, StopScanner
from antiphon.text.stop_patterns import StopPatternMatcher, check_patterns, compile_pattern
from antiphon.wire.errors import InvalidRequest


def scan(pieces: list[str], stops: tuple[str, ...], *, include: bool = False):
    """Return the text shown and the stop that ended it."""
    scanner = StopScanner(stops, include)
    shown = ""
    for piece in pieces:
        result = scanner.push(piece)
        if isinstance(result, StopMatch):
            return shown + result.text, result.stop
        shown += result
    return shown + scanner.flush(), None


def test_a_stop_string_across_three_pieces_ends_the_text():
    assert scan(["one <", "/s", "> two"], ("</s>",)) == ("one ", "</s>")


def test_the_match_stays_in_the_text_when_asked():
    assert scan(["one <", "/s> two"], ("</s>",), include=True) == ("one </s>", "</s>")


def test_what_only_began_like_a_stop_string_is_shown_at_the_end():
    assert scan(["a <", "/"], ("</s>",)) == ("a </", None)


def test_nothing_of_a_stop_string_is_shown_before_it_is_complete():
    scanner = StopScanner(("STOP",), include=False)
    assert scanner.push("xST") == "x"
    assert scanner.push("O") == ""
    assert scanner.push("x") == "STOx"


def test_the_earliest_match_wins_and_then_the_first_named():
    assert scan(["abcd"], ("cd", "bc")) == ("a", "bc")
    assert scan(["abcd"], ("bcd", "bc")) == ("a", "bcd")


@given(
    st.text("ab<", max_size=30),
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_stop_is_cut_at_its_first_completion(text: str, stops: list[str], data: st.DataObject):
    """One letter at a time: the first end of any stop decides, whatever else might begin there."""
    names = tuple(stops)
    expected = next(
        (
            (text[: end - len(stop)], stop)
            for end in range(1, len(text) + 1)
            for stop in sorted(names, key=len, reverse=True)
            if text[:end].endswith(stop)
        ),
        (text, None),
    )
    shown, stop = scan(list(text), names)
    assert (shown, stop) == expected


def match(pattern: str, text: str, *, include: bool = False):
    """Push a text letter by letter; return what is shown and what ended it."""
    scanner = StopScanner((), include, (pattern,))
    shown = ""
    for letter in text:
        result = scanner.push(letter)
        if isinstance(result, StopMatch):
            return shown + result.text, result.stop
        shown += result
    return shown + scanner.flush(), None


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [
        (r"\d{3}", "a 12 b 345 c", "a 12 b "),
        (r"END|stop\.", "we stop. END", "we "),
        (r"[^a-z ]+", "abc def9", "abc def"),
        (r"(?:ab)+c", "xababab ababc", "xababab "),
        (r"a.c", "ab\nabxabc", "ab\nabx"),
        (r"\n\n+", "a\nb\n\nc", "a\nb"),
        (r"\x41", "xyzA", "xyz"),
        (r"[]x]", "a]", "a"),
        (r"é{2}", "éxéé", "éx"),
    ],
)
def test_a_pattern_ends_the_text_where_its_match_begins(pattern: str, text: str, shown: str):
    assert match(pattern, text) == (shown, pattern)
    assert match(pattern, shown) == (shown, None)


def test_a_pattern_that_may_yet_come_true_is_held_back_and_no_more():
    scanner = StopScanner((), include=False, patterns=("ab+c",))
    assert scanner.push("xab") == "x"
    assert scanner.push("bb") == ""
    assert scanner.push("da") == "abbbd"
    assert scanner.flush() == "a"


def test_string_wins_over_a_pattern_at_the_same_position():
    scanner = StopScanner(("ab",), include=True, patterns=("abc?",))
    assert scanner.push("xab") == StopMatch("ab", "xab")


@pytest.mark.parametrize(
    "pattern",
    [
        "a*", "", "(", ")", "[", "a{2,1}", "(?=a)", "(?P<n>a)", r"(a)\1", "^a", "a$", r"\b", "*a",
        "a++", "x{600}", "((((a{9}){9}){9}){9}){9}", "((){999}){999}", "a" * 257, r"\N{DIGIT ONE}",
        "[b-a]", "a{", "(" * 100 + "a" + ")" * 100,
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_followed_is_refused(pattern: str):
    with pytest.raises(InvalidRequest) as refused:
        compile_pattern(pattern)
    assert refused.value.param == "stop_regex"


@pytest.mark.parametrize(
    ("patterns", "choices"),
    [(["x{256}", "y{256}"], 1), (["x{64}"], 8), (["a" + ".?" * 120], 3), (["ab"] * 200, 1)],
)
def test_patterns_that_together_have_too_many_states_are_refused(patterns: list[str], choices: int):
    with pytest.raises(InvalidRequest, match="a request has at most 512") as refused:
        check_patterns(patterns, choices)
    assert refused.value.param == "stop_regex"
    check_patterns(patterns[:1], 1)


@given(st.text("ab", max_size=60))
def test_no_text_makes_more_threads_than_there_are_states(text: str):
    made = compile_pattern("(a|b|ab)*(a?){30}c")
    follower = StopPatternMatcher(made)
    for letter in text:
        follower.feed(letter)
        assert len(follower._threads) <= made.size


@given(
    st.from_regex(r"(?:(?:[ab.]|\[ab\]|\(?:a\|b\))[*+?]?){1,6}", fullmatch=True),
    st.text("abc", max_size=30),
)
def test_pattern_ends_as_in_the_standard_library(pattern: str, text: str):
    """The first end of any match decides; of the matches that end there, the longest."""
    source = pattern.replace("(:", "(?:").replace("\\", "")
    try:
        compile_pattern(source)
    except InvalidRequest:
        return
    expected = next(
        (
            (text[:start], source)
            for end in range(1, len(text) + 1)
            for start in range(end)
            if re.compile(source).fullmatch(text, start, end)
        ),
        (text, None),
    )
    assert match(source, text) == expected


def test_a_pattern_that_explodes_elsewhere_takes_little_time():
    scanner = StopScanner((), include=False, patterns=("(a+)+b", "(a|a)*b", "(a?){100}b"))
    began = time.process_time()
    scanner.push("a" * 2000)
    assert time.process_time() - began < 5
