"""Parts of an output, in the order in which they were generated, and the sink of a format."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.reader import Emit, Reader, drop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from antiphon.gateway.parsing.tools.tool import OfferedTools
    from antiphon.wire.schemas import Json

_BETWEEN = " \t\r\n,;"  # characters that may separate two calls of one frame


class Content(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """Start of a tool call. Calls are consecutive; `index` counts them from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments, which together are JSON text.

    They are as generated: valid JSON only if the model generated valid JSON.
    """

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """End of a call. `complete` is False if it was malformed or truncated."""

    index: int
    complete: bool


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class ParsedToolCall(msgspec.Struct, frozen=True):
    index: int
    id: str
    name: str
    arguments: str
    complete: bool


class Parsed(msgspec.Struct, frozen=True):
    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedToolCall, ...] = ()


class Collector:
    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []
        self._complete: set[int] = set()

    def add(self, event: Event) -> None:
        match event:
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case CallBegin():
                self._calls.append((event, []))
            case CallArguments(index, text):
                self._calls[index][1].append(text)
            case CallEnd(index, complete):
                if complete:
                    self._complete.add(index)

    def parsed(self) -> Parsed:
        return Parsed(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            calls=tuple(
                ParsedToolCall(
                    index=call.index,
                    id=call.id,
                    name=call.name,
                    arguments="".join(arguments),
                    complete=call.index in self._complete,
                )
                for call, arguments in self._calls
            ),
        )


def collect(events: Iterable[Event]) -> Parsed:
    collector = Collector()
    for event in events:
        collector.add(event)
    return collector.parsed()


@dataclass
class EventSink:
    """Collects the events of one output, and applies the rules of which calls count."""

    offer: OfferedTools
    call_id: Callable[[str, int], str]
    _: KW_ONLY
    separate_reasoning: bool = True
    _events: list[Event] = field(default_factory=list[Event])
    _calls: int = 0
    _open: bool = False
    _offered: bool | None = None  # of the last call of this frame
    _shows_frame: bool = True

    def knows(self, name: str) -> bool:
        return name in self.offer.schemas

    def schema(self, name: str) -> Json:
        """The schema of a tool's arguments; empty if it is unknown."""
        return self.offer.schemas.get(name) or {}

    def content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text) if self.separate_reasoning else Content(text))

    def begin(self, reader: Reader, name: str) -> Emit:
        """Begin a call after its name; return the function that receives its arguments.

        A call of an unavailable tool is content, as generated: what the reader has kept, and what
        it reads until the call ends. A call beyond the limit is dropped.
        """
        assert not self._open, "one call at a time"
        offer = self.offer
        offered = self.knows(name)
        after_offered, self._offered = self._offered, offered
        if after_offered is None:
            self._shows_frame = not offered
        if not offered:
            kept = reader.kept()
            self.content(kept.lstrip(_BETWEEN) if after_offered else kept)
            reader.show(self.content)
            return drop
        reader.forget()
        if self._calls == offer.calls_max:
            return drop
        call_id = self.call_id(name, offer.calls_before + self._calls)
        self._events.append(CallBegin(self._calls, call_id, name))
        self._calls += 1
        self._open = True
        return self._add_arguments

    def end(self, reader: Reader, *, complete: bool) -> None:
        """End the call. Text after a complete call is held until its role is known."""
        if self._open:
            self._events.append(CallEnd(self._calls - 1, complete))
            self._open = False
        if complete:
            reader.keep()

    def settle(self, reader: Reader) -> bool:
        """End a frame of calls; return whether the text before its end delimiter is content, too.

        It is if the frame has no call, if its first call is of an unavailable tool, which makes the
        frame content, or if it broke off in such a call.
        """
        shown = self._shows_frame or reader.shows
        text = reader.kept()
        if shown:
            self.content(text)
        self._shows_frame, self._offered = True, None
        return shown

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._calls - 1, text))
