"""Declaration of a reasoning format, and the reader of delimited reasoning."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.reader import WHITE, Emit, Marks, Reader, Steps
from antiphon.wire.sampling import SPACE_MAX, ThinkingMarks

if TYPE_CHECKING:
    from antiphon.gateway.parsing.events import EventSink
    from antiphon.gateway.parsing.tools.format import ToolFormat


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models delimits its reasoning."""

    names: tuple[str, ...]  # for `--reasoning-parser`; the first is the main one
    begin: str
    end: str
    _: KW_ONLY
    # Whether an output starts in reasoning if the prompt does not show it: the template has written
    # the start delimiter, or the model omits it.
    inside: bool = False
    switch: str | None = None  # template variable that turns reasoning on and off
    special: bool = False  # the delimiters are special tokens: see `ToolFormat.special`
    cuts: tuple[str, ...] = ()  # other delimiters that end reasoning, if `channels` reads it
    around: tuple[str, ...] = ()  # around the answer that follows; they are dropped
    shown: bool = False  # stays in the content, with the start delimiter that the prompt has
    channels: ToolFormat | None = None  # reads reasoning, too, if both are one format

    def begins_inside(self, prompt_end: str | None, *, thinking: bool | None = None) -> bool:
        """Whether an output starts in reasoning.

        The last characters of the rendered prompt decide if they are known; otherwise `thinking`,
        the request's value of the `switch`.
        """
        if prompt_end is not None:
            end = prompt_end.rstrip()
            if end.endswith((self.begin, self.end)):
                return end.endswith(self.begin)
        return self.inside and thinking is not False

    def marks(self, *, inside: bool, call_marks: tuple[str, ...]) -> ThinkingMarks:
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
    space = yield from reader.word(WHITE, SPACE_MAX)
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
