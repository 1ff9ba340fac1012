"""Parts of an output, in the order in which they were generated."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text of the output."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

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
    """A complete call. `arguments` is JSON text if the model generated JSON."""

    index: int
    id: str
    name: str
    arguments: str
    complete: bool


class Parsed(msgspec.Struct, frozen=True):
    """A complete output. `content` and `reasoning` are empty if there is none."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedToolCall, ...] = ()


class Collector:
    """Collects the events of one output."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._begins: list[CallBegin] = []
        self._arguments: list[list[str]] = []
        self._complete: list[bool] = []

    def add(self, event: Event) -> None:
        """Add an event."""
        match event:
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case CallBegin():
                self._begins.append(event)
                self._arguments.append([])
                self._complete.append(False)
            case CallArguments(index, text):
                self._arguments[index].append(text)
            case CallEnd(index, complete):
                self._complete[index] = complete

    def parsed(self) -> Parsed:
        """Return the output so far."""
        rows = zip(self._begins, self._arguments, self._complete, strict=True)
        return Parsed(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            calls=tuple(
                ParsedToolCall(begin.index, begin.id, begin.name, "".join(arguments), complete)
                for begin, arguments, complete in rows
            ),
        )
