"""Stop strings are found wherever the borders of tokens lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.detokenizer.stop import Match, StopScanner


def scan(pieces: list[str], stops: tuple[str, ...], *, include: bool = False):
    """Return the text shown and the stop that ended it."""
    scanner = StopScanner(stops, include)
    shown = ""
    for piece in pieces:
        result = scanner.push(piece)
        if isinstance(result, Match):
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
def test_a_stop_is_cut_where_its_first_completion_says(
    text: str, stops: list[str], data: st.DataObject
):
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
