"""Calls as elements, with an element for each argument."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.gateway.parsing import json_text
from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.reader import Emit, Marks, Reader, Steps
from antiphon.gateway.parsing.tools.format import Body, CallOutcome
from antiphon.gateway.parsing.tools.values import ArgumentsWriter

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.wire.schemas import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """How calls are written between their start and end delimiters.

    Attributes:
        call: Text before and after a name; empty before if the delimiter implies that a name
            follows.
        call_end: Text after the arguments.
        argument: Text before and after the name of an argument, in all variants, each with whether
            the value is a string, JSON, or depends on the schema.
        argument_begin: Text before the name of an argument.
        argument_end: Text after its value.
        end: Delimiter after the calls; empty if each call ends by itself.
        lines: Whether a value may be on lines of its own: then a line break after the opening
            delimiter and one before the closing one are not part of it.
    """

    call: tuple[str, str]
    call_end: str
    argument_begin: str
    argument: tuple[tuple[str, bool | None], ...]
    argument_end: str
    end: str | None
    lines: bool = True


def tagged(tags: Tags) -> Body:
    """Create a reader of one or more calls."""
    stops = re.escape(tags.call[1][0] + ">\n")
    name_letters = re.compile(f"[^{stops}]*")
    ends = (tags.end,) if tags.end else ()
    values = Marks(*[f"\n{tags.argument_end}"] * tags.lines, tags.argument_end)

    def body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
        outcome = CallOutcome.NOTHING
        while True:
            if tags.call[0]:
                yield from reader.space()
                mark = yield from reader.starts(tags.call[0], *ends)
                if mark in ends and outcome is CallOutcome.DONE:
                    return CallOutcome.ENDED
                if mark != tags.call[0]:
                    return outcome
            name = yield from reader.word(name_letters, NAME_MAX)
            if not name or not (yield from reader.starts(tags.call[1])):
                return outcome
            complete = yield from arguments(reader, out.begin(reader, name), out.schema(name))
            out.end(reader, complete=complete)
            if not complete:
                return CallOutcome.BROKEN
            outcome = CallOutcome.DONE
            if not ends:
                return outcome

    def arguments(reader: Reader, emit: Emit, schema: Json) -> Steps[bool]:
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            sound = yield from json_text.value(reader, emit)
            yield from reader.space()
            return sound and (yield from reader.starts(tags.call_end)) is not None
        written = ArgumentsWriter(schema, emit)
        while True:
            yield from reader.space()
            mark = yield from reader.starts(tags.argument_begin, tags.call_end)
            if mark == tags.call_end:
                written.close()
                return True
            name = yield from reader.word(name_letters, NAME_MAX)
            after = yield from reader.starts(*(after for after, _ in tags.argument))
            if mark is None or after is None:
                return False
            if tags.lines:
                yield from reader.starts("\n")
            text = dict(tags.argument)[after]
            if not (yield from written.value(reader, name, values, text=text)):
                return False

    return body
