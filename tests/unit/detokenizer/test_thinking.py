"""The tokens of thinking are counted exactly, however its text is cut into tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.detokenizer.choice import ChoiceResult, ChoiceState
from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.reasoning.registry import REASONING_FORMATS, reasoning_format
from antiphon.gateway.parsing.tools.registry import tool_format
from antiphon.wire.base import FinishReason
from antiphon.wire.sampling import SPACE_MAX, StopStrings, ThinkingMarks

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """The count after each token, and after the end."""
    stop = StopStrings(strings=strings, thinking=marks)
    choice = ChoiceState(Tokens(pieces).decode, stop)
    told: list[int] = []
    for token in range(len(pieces)):
        if choice.end is None:
            choice.accept(token, [token], None)
            told.append(choice.reasoning_tokens)
    choice.finish(ChoiceResult(FinishReason.STOP))
    return [*told, choice.reasoning_tokens]


def inside(marks: ThinkingMarks) -> ThinkingMarks:
    return ThinkingMarks(begin=marks.begin, end=marks.end, cuts=marks.cuts, inside=True)


def test_thinking_counts_with_its_marks():
    assert counts(["<think>", "So", ".", "</think>", "Yes", "."]) == [1, 2, 3, 4, 4, 4, 4]


def test_a_mark_may_lie_across_tokens_and_a_token_across_its_end():
    assert counts(["<th", "ink>S", "o</thi", "nk>Yes", "."])[-1] == 4


def test_an_answer_without_thinking_has_none():
    assert counts(["<", "think is", " no mark"])[-1] == 0
    assert counts(["Yes <think>", "no", "</think>"])[-1] == 0
    assert counts([])[-1] == 0


def test_an_answer_that_begins_inside_needs_no_mark():
    assert counts(["So", ".", "</think>", "Yes"], inside(MARKS))[-1] == 3


def test_thinking_that_is_cut_off_counts_to_the_end():
    assert counts(["<think>", "So", " it", " </th"])[-1] == 4
    assert counts(["<think>", "So", " STOP", " it"], strings=("STOP",))[-1] == 3


def test_a_call_ends_thinking_and_is_none():
    assert counts(["<think>", "I", " call", "<tool", "_call>", "{}"]) == [1, 2, 3, 3, 3, 3, 3]


def test_what_may_be_a_call_counts_once_it_is_none():
    assert counts(["<think>", "a", "<tool", "box>", "</think>"]) == [1, 2, 2, 4, 5, 5]


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
        assert parsed.reasoning.strip() == told(thought, format_.begin, format_.end)
    pieces = cut(text, data.draw(st.lists(st.integers(0, 200), max_size=6)))
    assert counts(pieces, marks)[-1] <= len(pieces)


def told(thought: str, begin: str, end: str) -> str:
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
