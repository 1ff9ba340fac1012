"""The event queue of one request: written by the owner, read by one reader."""

from __future__ import annotations

import asyncio
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


class Wakeup:
    """Wakes the reader of one or more streams."""

    def __init__(self) -> None:
        self._reader: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Wake the reader, if it is waiting."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self) -> None:
        """Wait for a notification.

        Needs no timeout: the owner ends each request at its deadline.
        """
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None


class RequestStream:
    """Event queue of a request. The owner bounds it: it ends a request whose text is not read.

    Attributes:
        trace: Span of the whole request, ended with it.
        reservation: Quota of the tenant, held until the end.
        name: The client's request id, unique among running requests.
        api: API of the request.
        received_at: Monotonic time of receipt, as are `submitted_at`, `accepted_at`,
            `first_token_at`, `last_token_at` and `ended_at`.
        wakeup: Notified on each event; the reader of several streams shares one.
        starts_in_reasoning: Whether the output starts in reasoning.
        truncated: Whether the prompt was truncated.
        labels: Values of its custom metric labels.
        ended: The terminal event.
        finish_reason: Finish reason of the last choice.
        on_end: Called on the terminal event, with or without a reader.
    """

    def __init__(
        self,
        submit: SubmitRequest,
        trace: Span,
        reservation: QuotaReservation,
        *,
        api: str,
        received_at: float,
        submitted_at: float,
    ) -> None:
        self.submit = submit
        self.trace = trace
        self.reservation = reservation
        self.name: tuple[TenantId, ClientKey] | None = None
        self.api = api
        self.received_at = received_at
        self.submitted_at = submitted_at
        self.accepted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.ended_at: float | None = None
        self.ended: Ended | None = None
        self.finish_reason: FinishReason | None = None
        self.on_end: Callable[[], None] | None = None
        self.starts_in_reasoning = False
        self.truncated = False
        self.labels: tuple[str, ...] = ()
        self.wakeup = Wakeup()
        self._events: list[StreamEvent] = []

    @property
    def has_events(self) -> bool:
        """Whether there are unread events."""
        return bool(self._events)

    def put(self, event: StreamEvent, now: float) -> None:
        """Add an event and wake the reader."""
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
        self.wakeup.notify()

    async def get(self) -> list[StreamEvent]:
        """Wait for events and return all available ones in order. The last event is `Ended`."""
        while not self._events:
            await self.wakeup.wait()
        return self.get_nowait()

    def get_nowait(self) -> list[StreamEvent]:
        """Return the available events."""
        events, self._events = self._events, []
        return events


def raise_if_failed(events: list[StreamEvent]) -> None:
    """Raise the error of a request that failed before any output."""
    first = events[0]
    if isinstance(first, Ended) and first.error is not None:
        raise first.error
