"""Receives the events that a format reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    from antiphon.gateway.parsing.reader import Reader
    from antiphon.gateway.parsing.tools.offered_tools import OfferedTools
    from antiphon.wire.schemas import Json

_BETWEEN = " \t\r\n,;"
"""Characters that may separate two calls of one frame."""


class EventSink:
    """Collects the events of one output, and applies the rules of which calls count."""

    def __init__(
        self,
        offer: OfferedTools,
        call_id: Callable[[str, int], str],
        *,
        separate_reasoning: bool = True,
    ) -> None:
        """See `OfferedTools` for the rules.

        Args:
            offer: Available tools.
            call_id: Creates the id of a call from its name and its index in the conversation.
            separate_reasoning: Whether to separate reasoning from content.
        """
        self._offer = offer
        self._call_id = call_id
        self._separate_reasoning = separate_reasoning
        self._events: list[Event] = []
        self._calls = 0
        self._open = False
        self._offered: bool | None = None  # of the last call of this frame
        self._shows_frame = True

    def knows(self, name: str) -> bool:
        """Whether a tool with this name is available."""
        return self._offer.schema(name) is not None

    def schema(self, name: str) -> Json:
        """The schema of a tool's arguments; empty if it is unknown."""
        return self._offer.schema(name) or {}

    def content(self, text: str) -> None:
        """Emit content."""
        if text:
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Emit reasoning."""
        if text:
            self._events.append(Reasoning(text) if self._separate_reasoning else Content(text))

    def begin(self, reader: Reader, name: str) -> Emit:
        """Begin a call after its name; return the function that receives its arguments.

        A call of an unavailable tool is content, as generated: what the reader has kept, and what
        it reads until the call ends. A call beyond the limit is dropped.
        """
        assert not self._open, "one call at a time"
        offer = self._offer
        offered = self.knows(name) or offer.forward_unknown
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
        call_id = self._call_id(name, offer.calls_before + self._calls)
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
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _add_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._calls - 1, text))
