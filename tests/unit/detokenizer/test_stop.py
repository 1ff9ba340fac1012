"""Stops end an answer at their first completion, and reasoning tokens are counted."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.detokenizer.choice import ChoiceResult, ChoiceState, StopMatch, StopScanner
from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.formats import REASONING_FORMATS, reasoning_format, tool_format
from antiphon.text.stop_patterns import StopPatternMatcher, check_patterns, compile_pattern
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import SPACE_MAX, StopStrings, ThinkingMarks

if TYPE_CHECKING:
    from collections.abc import Sequence


def scan(
    pieces: Sequence[str],
    strings: tuple[str, ...] = (),
    patterns: tuple[str, ...] = (),
    *,
    include: bool = False,
) -> tuple[str, str | None]:
    """Return the emitted text and the stop that ended it."""
    scanner = StopScanner(strings, include, patterns)
    shown = ""
    for piece in pieces:
        result = scanner.push(piece)
        if isinstance(result, StopMatch):
            return shown + result.text, result.stop
        shown += result
    return shown + scanner.flush(), None


@pytest.mark.parametrize(
    ("pieces", "stops", "include", "expected"),
    [
        pytest.param(["one <", "/s", "> two"], ["</s>"], False, ("one ", "</s>"), id="in 3 pieces"),
        pytest.param(["one <", "/s> two"], ["</s>"], True, ("one </s>", "</s>"), id="included"),
        pytest.param(["a <", "/"], ["</s>"], False, ("a </", None), id="only its beginning"),
        pytest.param(["abcd"], ["cd", "bc"], False, ("a", "bc"), id="the earliest match"),
        pytest.param(["abcd"], ["bcd", "bc"], False, ("a", "bcd"), id="the first named"),
    ],
)
def test_stop_string_ends_the_text(
    pieces: list[str], stops: list[str], include: bool, expected: tuple[str, str | None]
):
    assert scan(pieces, tuple(stops), include=include) == expected


def test_nothing_of_a_stop_string_is_shown_before_it_is_complete():
    scanner = StopScanner(("STOP",), include=False)
    assert scanner.push("xST") == "x"
    assert scanner.push("O") == ""
    assert scanner.push("x") == "STOx"


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
    assert scan(text, names) == expected


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
    assert scan(text, patterns=(pattern,)) == (shown, pattern)
    assert scan(shown, patterns=(pattern,)) == (shown, None)


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
    assert scan(text, patterns=(source,)) == expected


def test_a_pattern_that_explodes_elsewhere_takes_little_time():
    scanner = StopScanner((), include=False, patterns=("(a+)+b", "(a|a)*b", "(a?){100}b"))
    began = time.process_time()
    scanner.push("a" * 2000)
    assert time.process_time() - began < 5


MARKS = ThinkingMarks(begin="<think>", end="</think>", cuts=("<tool_call>",))
HARMONY = reasoning_format("gpt-oss").marks(inside=False, call_marks=())
FORMATS = [pytest.param(format_, id=format_.names[0]) for format_ in REASONING_FORMATS]


class Tokens:
    """A vocabulary of the pieces of one answer."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = [piece.encode() for piece in pieces]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return b"".join(self._pieces[token] for token in ids).decode(errors="replace")


def counts(
    pieces: Sequence[str], marks: ThinkingMarks = MARKS, strings: tuple[str, ...] = ()
) -> list[int]:
    stop = StopStrings(strings=strings, thinking=marks)
    choice = ChoiceState(Tokens(pieces).decode, stop)
    after_each: list[int] = []
    for token in range(len(pieces)):
        if choice.end is None:
            choice.accept(token, [token], None)
            after_each.append(choice.reasoning_tokens)
    choice.finish(ChoiceResult(FinishReason.STOP))
    return [*after_each, choice.reasoning_tokens]


def inside(marks: ThinkingMarks) -> ThinkingMarks:
    return ThinkingMarks(begin=marks.begin, end=marks.end, cuts=marks.cuts, inside=True)


@pytest.mark.parametrize(
    ("pieces", "marks", "expected"),
    [
        pytest.param(["<th", "ink>S", "o</thi", "nk>Yes", "."], MARKS, 4, id="mark across tokens"),
        pytest.param(["<", "think is", " no mark"], MARKS, 0, id="no mark"),
        pytest.param(["Yes <think>", "no", "</think>"], MARKS, 0, id="mark after text"),
        pytest.param([], MARKS, 0, id="no token"),
        pytest.param(["So", ".", "</think>", "Yes"], inside(MARKS), 3, id="begins inside"),
        pytest.param(["<think>", "So", " it", " </th"], MARKS, 4, id="cut off"),
    ],
)
def test_reasoning_tokens_at_the_end(pieces: list[str], marks: ThinkingMarks, expected: int):
    assert counts(pieces, marks)[-1] == expected


def test_reasoning_that_a_stop_string_ends_counts_up_to_it():
    assert counts(["<think>", "So", " STOP", " it"], strings=("STOP",))[-1] == 3


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<think>", "So", ".", "</think>", "Yes", "."], [1, 2, 3, 4, 4, 4, 4]),
        (["<think>", "I", " call", "<tool", "_call>", "{}"], [1, 2, 3, 3, 3, 3, 3]),
        (["<think>", "a", "<tool", "box>", "</think>"], [1, 2, 2, 4, 5, 5]),
    ],
    ids=["with both marks", "ended by a tool call", "what may be a call counts once it is none"],
)
def test_reasoning_tokens_after_each_token(pieces: list[str], expected: list[int]):
    assert counts(pieces) == expected


def test_parts_of_a_character_are_tokens_too():
    four = Tokens(["x"])
    four._pieces = [b"<think>", *("👋".encode()[n : n + 1] for n in range(4)), b"</think>", b"a"]  # pyright: ignore[reportPrivateUsage]
    choice = ChoiceState(four.decode, StopStrings(thinking=MARKS))
    choice.accept(0, range(7), None)
    choice.finish(ChoiceResult(FinishReason.LENGTH))
    assert choice.reasoning_tokens == 6


def test_thinking_on_channels_comes_more_than_once():
    think = ["<|channel|>", "analysis", "<|message|>", "So", "<|end|>"]
    call = ["<|start|>", "assistant", "<|channel|>", "commentary", "<|message|>", "I", "<|end|>"]
    final = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes"]
    assert counts([*think, *call, "<|start|>", "a", *think, *final], HARMONY)[-1] == 10
    assert counts([*think[:4], *think, *final], HARMONY)[-1] == 9
    assert counts(["".join([*think[:4], *think])], HARMONY)[-1] == 1


@pytest.mark.parametrize("format_", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_counted_reasoning_is_the_reasoning_that_clients_get(format_, data):
    """In tokens of one character the count is the length up to where the parser says it ends."""
    hermes = tool_format("hermes")
    with_calls = format_.channels is None and data.draw(st.booleans())
    begins_inside = format_.channels is None and data.draw(st.booleans())
    marks = [format_.begin, format_.end, *hermes.marks, format_.begin[:-1], format_.end[1:]]
    part = st.sampled_from([*marks, "a", "b", "\n", " " * SPACE_MAX, "<", "|>"])
    text = "".join(data.draw(st.lists(part, max_size=8)))
    marks = format_.marks(inside=begins_inside, call_marks=hermes.marks if with_calls else ())
    parsed = parse(
        AnswerParser(reasoning=format_, tools=hermes if with_calls else None, inside=begins_inside),
        [text],
    )
    count = counts(list(text), marks)[-1]
    # The returned reasoning has neither the markers nor the white space around it.
    assert bool(parsed.reasoning.strip()) <= bool(count)
    assert count >= len(parsed.reasoning)
    if format_.channels is None and not format_.shown:
        thought = text[:count]
        assert parsed.reasoning.strip() == reasoning_in(thought, format_.begin, format_.end)
    pieces = cut(text, data.draw(st.lists(st.integers(0, 200), max_size=6)))
    assert counts(pieces, marks)[-1] <= len(pieces)


def reasoning_in(thought: str, begin: str, end: str) -> str:
    """The thinking in such a beginning of an answer."""
    head = thought[:SPACE_MAX]
    body = thought[len(head) - len(head.lstrip()) :]
    return body.removeprefix(begin).removesuffix(end).strip()


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places})
    return [piece for a, b in zip([0, *at], [*at, len(text)], strict=True) if (piece := text[a:b])]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "a", " ", "<", "</th"]), max_size=8
    ),
    st.lists(st.integers(0, 80), max_size=8),
    st.booleans(),
)
def test_a_token_counts_if_some_of_it_is_thinking(parts, places, within):
    text = "".join(parts)
    marks = inside(MARKS) if within else MARKS
    characters = counts(list(text), marks)[-1]
    pieces = cut(text, places)
    ends = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces))]
    starts = [end - len(piece) for end, piece in zip(ends, pieces, strict=True)]
    assert counts(pieces, marks)[-1] == sum(start < characters for start in starts)
