"""The event queue of one request: written by the owner, read by one reader."""

from __future__ import annotations

import asyncio
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from antiphon.gateway.owner.actions import Accepted, Ended, Finished, TextDelta

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.gateway.access.limits import QuotaReservation
    from antiphon.gateway.owner.actions import StreamEvent
    from antiphon.telemetry.tracing import Span
    from antiphon.wire.base import FinishReason
    from antiphon.wire.ids import ClientKey, TenantId
    from antiphon.wire.submit import SubmitRequest


@dataclass(eq=False)
class RequestStream:
    """Event queue of a request. The owner bounds it: it ends a request whose text is not read."""

    submit: SubmitRequest
    trace: Span  # of the whole request, ended with it
    reservation: QuotaReservation  # held until the end
    _: KW_ONLY
    api: str
    received_at: float  # on the monotonic clock, as are the times below
    submitted_at: float
    accepted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    ended: Ended | None = None
    finish_reason: FinishReason | None = None
    on_end: Callable[[], None] | None = None  # called with or without a reader
    name: tuple[TenantId, ClientKey] | None = None  # the client's id of it
    starts_in_reasoning: bool = False
    truncated: bool = False
    labels: tuple[str, ...] = ()  # values of its custom metric labels
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)  # shared by a reader of several
    _events: list[StreamEvent] = field(default_factory=list["StreamEvent"])

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def put(self, event: StreamEvent, now: float) -> None:
        match event:
            case Accepted():
                self.accepted_at = now
            case TextDelta():
                self.first_token_at = self.first_token_at or now
                self.last_token_at = now
            case Finished():
                self.finish_reason = event.reason
            case Ended():
                self.ended = event
                self.ended_at = now
                self.trace.end(event.error)
                self.reservation.end(event.usage.prompt_tokens + event.usage.completion_tokens)
                if self.on_end is not None:
                    self.on_end()
        self._events.append(event)
        self.wakeup.set()

    async def get(self) -> list[StreamEvent]:
        """Wait for events and return all available ones in order. The last event is `Ended`."""
        while not self._events:
            self.wakeup.clear()
            await self.wakeup.wait()  # at most to the request's deadline, when its owner ends it
        return self.get_nowait()

    def get_nowait(self) -> list[StreamEvent]:
        events, self._events = self._events, []
        return events


def raise_if_failed(events: list[StreamEvent]) -> None:
    """Raise the error of a request that failed before any output."""
    first = events[0]
    if isinstance(first, Ended) and first.error is not None:
        raise first.error
