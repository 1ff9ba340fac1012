"""Where a format says what it has read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from antiphon.gateway.parsing.reader import Emit, drop

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.gateway.parsing.tools.offer import Offer
    from antiphon.wire.schemas import Json


class Output:
    """The events of one answer, and the rules of which calls count."""

    def __init__(
        self,
        offer: Offer,
        call_id: Callable[[str, int], str],
        *,
        separate_reasoning: bool = True,
    ) -> None:
        """See `Offer` for the rules.

        Args:
            offer: The tools that may be called.
            call_id: Makes the id of a call from its name and its number in the conversation.
            separate_reasoning: Whether thinking is told apart from the content.
        """
        self._offer = offer
        self._call_id = call_id
        self._separate_reasoning = separate_reasoning
        self._events: list[Event] = []
        self._calls = 0
        self._open = False
        self._spoke = False
        self._other: tuple[str, list[str]] | None = None

    def knows(self, name: str) -> bool:
        """Whether there is such a tool."""
        return self._offer.schema(name) is not None

    def schema(self, name: str) -> Json:
        """The schema of a tool's arguments; an empty one if it is not known."""
        return self._offer.schema(name) or {}

    def content(self, text: str) -> None:
        """Tell text for the reader."""
        if text:
            self._spoke = True
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Tell a piece of thinking."""
        if text:
            self._events.append(Reasoning(text) if self._separate_reasoning else Content(text))

    def begin(self, name: str) -> Emit:
        """Begin a call; return what takes its arguments.

        A call of a tool that was not offered becomes text once it is over: it is all that the model
        has answered. One call too many is dropped.
        """
        assert not self._open, "one call at a time"
        offer = self._offer
        if not (self.knows(name) or offer.forward_unknown):
            self._other = (name, [])
            return self._other[1].append
        if self._calls == offer.calls_max:
            return drop
        call_id = self._call_id(name, offer.calls_before + self._calls)
        self._events.append(CallBegin(self._calls, call_id, name))
        self._calls += 1
        self._open = True
        return self._argue

    def end(self, *, complete: bool) -> None:
        """End the call, if it counts."""
        if self._other is not None:
            (name, arguments), self._other = self._other, None
            self.content(
                _as_text(name, "".join(arguments), complete=complete, after_text=self._spoke)
            )
        if self._open:
            self._events.append(CallEnd(self._calls - 1, complete))
            self._open = False

    def drain(self) -> list[Event]:
        """Return what was told since the last time."""
        events, self._events = self._events, []
        return events

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._calls - 1, text))


def _as_text(name: str, arguments: str, *, complete: bool, after_text: bool) -> str:
    """A call as JSON, in a line of its own; without its end where it was cut off."""
    shown = msgspec.json.encode(name).decode()
    call = f'{{"name": {shown}, "arguments": {arguments}' + ("}" if complete else "")
    return f"\n{call}" if after_text else call
