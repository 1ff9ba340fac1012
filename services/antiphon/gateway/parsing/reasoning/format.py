"""What a format of thinking declares, and how thinking between two marks is read."""

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
    """How a family of models marks its thinking.

    Attributes:
        names: What `--reasoning-parser` calls it; the first is the main one.
        begin: The mark before it.
        end: The mark after it.
        inside: Whether an answer begins as thinking where the prompt does not tell: its template
            has written the first mark, or the model leaves it out.
        switch: The template's setting that turns thinking on and off, if it has one.
        special: Whether the marks are special tokens: see `ToolFormat.special`.
        cuts: Other marks that end it, where `channels` reads it.
        around: Marks around the answer that follows; they are dropped.
        shown: The thinking stays in the answer, with the first mark, which the prompt has written.
        channels: The format of calls that reads thinking, too, where the two are one.
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
        """Whether an answer to this prompt begins as thinking.

        Args:
            prompt_end: The last characters of the rendered prompt, if they are known: what
                stands there is certain.
            thinking: What the request said of the `switch`.
        """
        if prompt_end is not None:
            end = prompt_end.rstrip()
            if end.endswith((self.begin, self.end)):
                return end.endswith(self.begin)
        return self.inside and thinking is not False

    def marks(self, *, inside: bool, call_marks: tuple[str, ...]) -> ThinkingMarks:
        """What its tokens are counted by.

        Args:
            inside: Whether the answer begins as thinking.
            call_marks: With these calls begin.
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
    """Read thinking at the beginning of an answer, and pass on the rest.

    It ends with its mark, or where a call of a tool begins. White space around it is dropped.
    """
    if format_.shown:
        if inside:
            yield from reader.starts(format_.begin)
            rest(format_.begin)
        yield from reader.rest(rest)
        return
    space = yield from reader.word(_WHITE, SPACE_MAX)
    begun = yield from reader.starts(format_.begin, format_.end)
    if begun == format_.end:  # it says so that it does not think
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
    """Read an answer without calls, and drop the marks around it."""
    marks = Marks(*around)
    while (yield from reader.until(marks, out.content)) is not None:
        pass
