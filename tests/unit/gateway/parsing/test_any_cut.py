"""What is made of an answer does not depend on how it was cut into pieces."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gateway.parsing.renderers import CALLS_ALONE, FORMATS, RENDERERS, TYPED

from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from antiphon.gateway.parsing.formats import REASONING_FORMATS
from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.reader import TRIM_MAX
from antiphon.gateway.parsing.tools.tool import OfferedTools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.gateway.parsing.reasoning import ReasoningFormat
    from antiphon.gateway.parsing.tools.format import ToolFormat
    from antiphon.wire.schemas import Json

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "number"},
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
        "note": {"type": ["string", "null"]},
    },
}
OFFER = OfferedTools(schemas={"get_weather": SCHEMA, "add-up.2": SCHEMA})

words = st.text(st.sampled_from("abcXYZ 012.,:;'\"\\/é世👋\n\t{}[]()_-="), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-999, 999) | words
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)
arguments: st.SearchStrategy[Mapping[str, object]] = st.fixed_dictionaries(
    {},
    optional={
        "city": words,
        "days": st.integers(-99, 10**12),
        "wind": st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3)),
        "sure": st.booleans(),
        "tags": st.lists(words, max_size=3),
        "more": st.dictionaries(st.sampled_from(["a", "b"]), values, max_size=2),
    },
)
calls = st.lists(st.tuples(st.sampled_from(sorted(OFFER.schemas)), arguments), max_size=3)


def parser(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None = None, *, inside: bool = False
) -> AnswerParser:
    return AnswerParser(tools=tools, offer=OFFER, reasoning=reasoning, inside=inside)


def events(made: AnswerParser, pieces: Sequence[str]) -> list[Event]:
    """All events, neighbours of one kind put together, without ids, which are random."""
    joined: list[Event] = []
    for event in [event for piece in pieces for event in made.feed(piece)] + made.end():
        last = joined[-1] if joined else None
        match last, event:
            case (Content(a), Content(b)):
                joined[-1] = Content(a + b)
            case (Reasoning(a), Reasoning(b)):
                joined[-1] = Reasoning(a + b)
            case (CallArguments(index, a), CallArguments(same, b)) if index == same:
                joined[-1] = CallArguments(index, a + b)
            case (_, CallBegin(index, _, name)):
                joined.append(CallBegin(index, "", name))
            case _:
                joined.append(event)
    return joined


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def pieces_of(format_: ToolFormat) -> st.SearchStrategy[str]:
    """Garbage that looks like the format: its marks, parts of them, and what stands between."""
    written = format_.example + RENDERERS[format_.names[0]][0](
        "so", [("get_weather", {"city": "x", "days": 1}), ("unknown", {})]
    )
    marks = re.findall(r"<[^<>]*>|\[[A-Z_]+\]|[\w.]+|\s+|.", written)
    more = {"<think>", "</think>", "get_weather", "null", "\n", " " * 20}
    parts = st.sampled_from(sorted({*marks, *more}))
    partial = st.tuples(parts, st.integers(0, 12)).map(lambda pair: pair[0][: pair[1]])
    return st.lists(parts | parts | partial | words, max_size=24).map("".join)


@pytest.mark.parametrize("format_", FORMATS)
@settings(max_examples=60)
@given(data=st.data())
def test_calls_are_what_the_formats_own_template_wrote(format_: ToolFormat, data: st.DataObject):
    name = format_.names[0]
    render = data.draw(st.sampled_from(RENDERERS[name]))
    made = data.draw(calls.filter(bool) if render in CALLS_ALONE else calls)
    if name in TYPED:  # no quotes there: white space at the ends of a text is not certain
        made = [
            (n, {k: v.strip() if isinstance(v, str) else v for k, v in a.items()}) for n, a in made
        ]
    text = render("Let me see.", made)
    parsed = parse(parser(format_), cut(text, data.draw(st.lists(st.integers(0, 999), max_size=9))))
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == made
    assert all(call.complete for call in parsed.calls)
    assert parsed.content == ("" if render in CALLS_ALONE else "Let me see.")


@pytest.mark.parametrize("format_", FORMATS)
@settings(max_examples=40)
@given(data=st.data())
def test_no_cut_changes_anything(format_: ToolFormat, data: st.DataObject):
    reasoning = data.draw(st.sampled_from([None, *REASONING_FORMATS]))
    inside = data.draw(st.booleans())
    begin = (
        data.draw(st.sampled_from(["", reasoning.begin + "\nhm\n" + reasoning.end]))
        if reasoning
        else ""
    )
    text = begin + data.draw(pieces_of(format_))
    whole = events(parser(format_, reasoning, inside=inside), [text])
    for pieces in (list(text), cut(text, data.draw(st.lists(st.integers(0, 999), max_size=9)))):
        assert events(parser(format_, reasoning, inside=inside), pieces) == whole


@pytest.mark.parametrize("format_", FORMATS)
def test_no_single_cut_changes_an_answer_with_everything(format_: ToolFormat):
    think = REASONING_FORMATS[-1]
    made = [("get_weather", {"city": 'a\\b"c</x>'}), ("unknown", {}), ("add-up.2", {"days": 2})]
    for render in RENDERERS[format_.names[0]]:
        text = f"<think>\nso <b\n</think>\n\n{render('Well.' + ' ' * 40, made)}\nand <so on"
        whole = events(parser(format_, think), [text])
        for place in range(len(text)):
            assert events(parser(format_, think), [text[:place], text[place:]]) == whole, place


@pytest.mark.parametrize("format_", FORMATS)
@settings(max_examples=40)
@given(data=st.data())
def test_every_call_that_begins_ends_and_calls_come_one_after_another(
    format_: ToolFormat, data: st.DataObject
):
    text = data.draw(pieces_of(format_))
    open_: int | None = None
    begun = 0
    for event in events(parser(format_), [text]):
        match event:
            case CallBegin(index):
                assert open_ is None
                assert index == begun
                open_, begun = index, begun + 1
            case CallArguments(index):
                assert index == open_
            case CallEnd(index):
                assert index == open_
                open_ = None
            case _:
                assert open_ is None
    assert open_ is None


@pytest.mark.parametrize("format_", FORMATS)
@settings(max_examples=40)
@given(
    text=st.text(st.characters(exclude_characters="<[{|◁", exclude_categories=["Cs"]), max_size=60)
)
def test_text_without_marks_is_content_as_it_is(format_: ToolFormat, text: str):
    if format_.names[0] == "gpt-oss":
        text = f"x{text}"  # `to=` at the beginning is the head of a message
    assert parse(parser(format_), list(text)).content == text


@pytest.mark.parametrize("format_", FORMATS)
@settings(max_examples=30)
@given(data=st.data())
def test_at_most_a_mark_and_a_little_white_space_waits_in_text(
    format_: ToolFormat, data: st.DataObject
):
    """What holds text back is never more than what could become a mark, or a name in one."""
    made = parser(format_)
    for character in data.draw(pieces_of(format_)):
        made.feed(character)
        assert made.held <= NAME_MAX + TRIM_MAX
