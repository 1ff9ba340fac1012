"""The events of one request on their way to its client: put by the owner, taken by one reader."""

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
    """Rung when there is something to take; waited for by one reader, of one stream or more."""

    def __init__(self) -> None:
        self._reader: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Wake the reader, if it waits."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self) -> None:
        """Wait until it rings. Needs no deadline: the owner ends each request at its own."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None


class RequestStream:
    """Bounded by the owner, which ends a request whose text is not read.

    Attributes:
        trace: The span of the whole request; ends with it.
        name: What the client calls it, unique among live requests.
        door: By which API it came.
        came_at: When, by the gateway's clock; so are `opened_at` (encoded and submitted),
            `accepted_at`, `said_at` (first text), `spoke_at` (last text) and `ended_at`.
        bell: Rung by each event; a reader of several streams gives them one.
        inside: Whether the answer begins as thinking.
        truncated: Whether its prompt is the beginning only of what the client sent.
        labels: Values of the custom labels of its metrics.
        hold: What it has of its tenant's limits, until its end.
        ended: The terminal, once it was put.
        reason: Why the last choice finished.
        on_end: Called when the terminal is put, whether or not anybody reads.
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
        """Whether there are events that nobody has taken."""
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
        """Wait for events and take all there are, in order. The last one ever is `Ended`."""
        while not self._events:
            await self.wakeup.wait()
        return self.get_nowait()

    def get_nowait(self) -> list[StreamEvent]:
        """Take what there is."""
        events, self._events = self._events, []
        return events


def raise_if_failed(events: list[StreamEvent]) -> None:
    """Raise the error of a request that ended before it said anything."""
    first = events[0]
    if isinstance(first, Ended) and first.error is not None:
        raise first.error
