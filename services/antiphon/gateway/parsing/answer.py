"""Parser of one output: reasoning first, then tool calls. The entry point of this package.

```python
parser = AnswerParser(
    tools=tool_format("hermes"),          # None: the output has no tool calls
    offer=OfferedTools(schemas={"f": {...}}),  # available tools
    reasoning=reasoning_format("qwen3"),  # None: reasoning stays in the content
    inside=...,                           # ReasoningFormat.begins_inside(...)
)
for text in pieces:
    for event in parser.feed(text): ...   # Content, Reasoning, CallBegin, CallArguments, CallEnd
for event in parser.end(): ...            # a truncated call ends here, with complete=False
```

One parser per choice. No output of a model raises an error. The events depend on how the text was
split only in their boundaries: the concatenated texts of one kind are always the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.events import Event, EventSink, Parsed, collect
from antiphon.gateway.parsing.reader import Reader, Steps
from antiphon.gateway.parsing.reasoning import ReasoningFormat, bare, thinking
from antiphon.gateway.parsing.tools.format import ToolFormat, random_id
from antiphon.gateway.parsing.tools.tool import OfferedTools

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_NO_OFFER = OfferedTools()


class AnswerParser:
    def __init__(
        self,
        *,
        tools: ToolFormat | None = None,
        offer: OfferedTools = _NO_OFFER,
        reasoning: ReasoningFormat | None = None,
        inside: bool = False,
    ) -> None:
        channels = reasoning.channels if reasoning else None
        self._tools = tools or channels
        # If both are one format, its tool call reader emits the reasoning, too.
        self._reasoning = None if channels else reasoning
        self._inside = inside
        call_id = tools.call_id if tools else random_id
        self._out = EventSink(offer, call_id, separate_reasoning=reasoning is not None)
        self._calls = IncrementalReader(self._read_calls)
        self._thinking = IncrementalReader(self._read_thinking) if self._reasoning else None

    @property
    def held(self) -> int:
        """Number of characters held back until later text decides what they are."""
        return self._calls.held + (self._thinking.held if self._thinking else 0)

    def feed(self, text: str) -> list[Event]:
        (self._thinking or self._calls).feed(text)
        return self._out.drain()

    def end(self) -> list[Event]:
        """Return the remaining events at the end of the output."""
        if self._thinking:
            self._thinking.end()
        self._calls.end()
        return self._out.drain()

    def _read_thinking(self, reader: Reader) -> Steps[None]:
        assert self._reasoning is not None, "the reasoning format has delimiters"
        return thinking(
            reader,
            self._out,
            self._reasoning,
            self._calls.feed,
            inside=self._inside,
            tool_marks=self._tools.marks if self._tools else (),
        )

    def _read_calls(self, reader: Reader) -> Steps[None]:
        if self._tools is None:
            return bare(reader, self._out, self._reasoning.around if self._reasoning else ())
        return self._tools.read(reader, self._out)


def parse(parser: AnswerParser, pieces: Sequence[str]) -> Parsed:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return collect([*events, *parser.end()])


class IncrementalReader:
    """Runs a reader on text that arrives in pieces."""

    def __init__(self, read: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = read(self._reader)
        self._done = False

    @property
    def held(self) -> int:
        return self._reader.held

    def feed(self, text: str) -> None:
        self._reader.push(text)
        self._run()

    def end(self) -> None:
        self._reader.close()
        self._run()
        assert self._done, "a reader waits for text that will not arrive"
        assert self._reader.ended, "a reader left text unread"

    def _run(self) -> None:
        if not self._done:
            self._done = next(self._steps, self) is self
            self._reader.flush()
