"""What an answer is made of, in the order in which it was written."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thinking."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A call of a tool. Calls come one after another, `index` counts them from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments, which together are a JSON text.

    They are what the model said: JSON only if the model wrote JSON.
    """

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The call is over. `complete` is False if it was broken or cut off."""

    index: int
    complete: bool


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class ParsedToolCall(msgspec.Struct, frozen=True):
    """A whole call; `arguments` is a JSON text if the model wrote one."""

    index: int
    id: str
    name: str
    arguments: str
    complete: bool


class Parsed(msgspec.Struct, frozen=True):
    """A whole answer, taken apart. `content` and `reasoning` are empty where there is none."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedToolCall, ...] = ()


class Collector:
    """Puts the events of one answer together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._begins: list[CallBegin] = []
        self._arguments: list[list[str]] = []
        self._complete: list[bool] = []

    def add(self, event: Event) -> None:
        """Take the next event."""
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
        """What came so far."""
        rows = zip(self._begins, self._arguments, self._complete, strict=True)
        return Parsed(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            calls=tuple(
                ParsedToolCall(begin.index, begin.id, begin.name, "".join(arguments), complete)
                for begin, arguments, complete in rows
            ),
        )
