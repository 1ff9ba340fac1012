"""The parser of one answer: its thinking first, then its calls. What other code uses is here.

```python
parser = AnswerParser(
    tools=tool_format("hermes"),          # None: the answer has no calls
    offer=Offer(schemas={"f": {...}}),    # what may be called
    reasoning=reasoning_format("qwen3"),  # None: thinking stays in the content
    inside=...,                           # ReasoningFormat.begins_inside(...)
)
for text in pieces:
    for event in parser.feed(text): ...   # Content, Reasoning, CallBegin, CallArguments, CallEnd
for event in parser.end(): ...            # a call that is cut off ends here, with complete=False
```

One parser a choice. Nothing here raises for what a model said. The events do not depend on how the
text was cut but for the cuts in them: the texts of one kind, put together, are always the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.event_sink import EventSink
from antiphon.gateway.parsing.events import Collector, Event, Parsed
from antiphon.gateway.parsing.incremental import IncrementalReader
from antiphon.gateway.parsing.reasoning.format import ReasoningFormat, bare, thinking
from antiphon.gateway.parsing.tools.format import ToolFormat, random_id
from antiphon.gateway.parsing.tools.offered_tools import OfferedTools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.parsing.reader import Reader, Steps

_NO_OFFER = OfferedTools()


class AnswerParser:
    """Takes one answer apart while it comes in."""

    def __init__(
        self,
        *,
        tools: ToolFormat | None = None,
        offer: OfferedTools = _NO_OFFER,
        reasoning: ReasoningFormat | None = None,
        inside: bool = False,
    ) -> None:
        """Nothing was read yet.

        Args:
            tools: How calls are written; None: nothing is a call.
            offer: Which calls count.
            reasoning: How thinking is marked; None: nothing is thinking.
            inside: Whether the answer begins as thinking: see `ReasoningFormat.begins_inside`.
        """
        channels = reasoning.channels if reasoning else None
        self._tools = tools or channels
        # Where the two are one format, its reader of calls tells the thinking, too.
        self._reasoning = None if channels else reasoning
        self._inside = inside
        call_id = tools.call_id if tools else random_id
        self._out = EventSink(offer, call_id, separate_reasoning=reasoning is not None)
        self._calls = IncrementalReader(self._read_calls)
        self._thinking = IncrementalReader(self._read_thinking) if self._reasoning else None

    @property
    def held(self) -> int:
        """Characters that wait for the text that decides what they are."""
        return self._calls.held + (self._thinking.held if self._thinking else 0)

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the answer; return what is certain now."""
        (self._thinking or self._calls).feed(text)
        return self._out.drain()

    def end(self) -> list[Event]:
        """Return what is left: the answer is over."""
        if self._thinking:
            self._thinking.end()
        self._calls.end()
        return self._out.drain()

    def _read_thinking(self, reader: Reader) -> Steps[None]:
        assert self._reasoning is not None, "only what marks its thinking is read so"
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
    """Take a whole answer apart."""
    collector = Collector()
    for piece in pieces:
        for event in parser.feed(piece):
            collector.add(event)
    for event in parser.end():
        collector.add(event)
    return collector.parsed()
