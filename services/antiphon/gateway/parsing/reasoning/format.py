"""Declaration of a reasoning format, and the reader of delimited reasoning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.reader import Emit, Marks, Steps
from antiphon.wire.thinking import SPACE_MAX, ThinkingMarks

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader
    from antiphon.gateway.parsing.tools.format import ToolFormat

_WHITE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models delimits its reasoning.

    Attributes:
        names: Names for `--reasoning-parser`; the first is the main one.
        begin: Start delimiter.
        end: End delimiter.
        inside: Whether an output starts in reasoning if the prompt does not show it: the template
            has written the start delimiter, or the model omits it.
        switch: Template variable that turns reasoning on and off, if there is one.
        special: Whether the delimiters are special tokens: see `ToolFormat.special`.
        cuts: Other delimiters that end reasoning, if `channels` reads it.
        around: Delimiters around the answer that follows; they are dropped.
        shown: Reasoning stays in the content, with the start delimiter that the prompt has.
        channels: The tool call format that reads reasoning, too, if both are one format.
    """

    names: tuple[str, ...]
    begin: str
    end: str
    inside: bool = False
    switch: str | None = None
    special: bool = False
    cuts: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    shown: bool = False
    channels: ToolFormat | None = None

    def begins_inside(self, prompt_end: str | None, *, thinking: bool | None = None) -> bool:
        """Whether an output to this prompt starts in reasoning.

        Args:
            prompt_end: The last characters of the rendered prompt, if known; they are
                authoritative.
            thinking: The request's value of the `switch`.
        """
        if prompt_end is not None:
            end = prompt_end.rstrip()
            if end.endswith((self.begin, self.end)):
                return end.endswith(self.begin)
        return self.inside and thinking is not False

    def marks(self, *, inside: bool, call_marks: tuple[str, ...]) -> ThinkingMarks:
        """Delimiters by which reasoning tokens are counted.

        Args:
            inside: Whether the output starts in reasoning.
            call_marks: Delimiters that start a tool call.
        """
        return ThinkingMarks(
            begin=self.begin,
            end=self.end,
            cuts=self.cuts + call_marks,
            inside=inside,
            again=self.channels is not None,
        )


def thinking(
    reader: Reader,
    out: EventSink,
    format_: ReasoningFormat,
    rest: Emit,
    *,
    inside: bool,
    tool_marks: tuple[str, ...],
) -> Steps[None]:
    """Read reasoning at the start of an output, and pass on the rest.

    It ends at its delimiter, or where a tool call starts. White space around it is dropped.
    """
    if format_.shown:
        if inside:
            yield from reader.starts(format_.begin)
            rest(format_.begin)
        yield from reader.rest(rest)
        return
    space = yield from reader.word(_WHITE, SPACE_MAX)
    begun = yield from reader.starts(format_.begin, format_.end)
    if begun == format_.end:  # the model states that it does not reason
        yield from reader.space()
    elif inside or begun:
        yield from reader.space()
        ends = Marks(format_.end, *tool_marks, trim=True)
        mark = yield from reader.until(ends, out.reasoning)
        if mark in tool_marks:
            rest(mark)
        else:
            yield from reader.space()
    elif space:
        rest(space)
    yield from reader.rest(rest)


def bare(reader: Reader, out: EventSink, around: tuple[str, ...]) -> Steps[None]:
    """Read an output without tool calls, and drop the delimiters around it."""
    marks = Marks(*around)
    while (yield from reader.until(marks, out.content)) is not None:
        pass
