"""All endpoints of a process: opened, drained in order, with a reply to every accepted call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from antiphon.service.route_metrics import RouteMetrics
from antiphon.service.tasks import Tasks
from antiphon.wire.errors import Unavailable

if TYPE_CHECKING:
    from antiphon.bus.bus import Bus
    from antiphon.bus.discovery import EndpointCounters as Tally
    from antiphon.bus.transport import Subscription
    from antiphon.service.endpoint import Endpoint
    from antiphon.service.inbox import Inbox, InboxLimits
    from antiphon.telemetry.metrics import Metrics


class Listener:
    """An open endpoint. Implements `Subscription`: draining ends it."""

    def __init__(
        self, subscription: Subscription, inbox: Inbox, tally: Tally, *, accepts_work: bool
    ) -> None:
        self.counters = tally
        self._subscription = subscription
        self._inbox = inbox
        self._drained = False
        self.accepts_work = accepts_work

    @property
    def ended(self) -> bool:
        """Whether it is drained and no call is pending."""
        return self._drained and self._inbox.empty

    async def drain(self) -> None:
        """Unsubscribe; messages that had arrived are still accepted, later ones rejected."""
        await self._subscription.drain()
        self._inbox.shut()
        self._drained = True

    def shut(self) -> None:
        """Reject all calls from now on."""
        self._inbox.shut()

    async def close(self) -> None:
        """Reply `Unavailable` to all pending calls."""
        await self._inbox.close()


class Listeners:
    """Opens endpoints and runs their calls. On exit, every accepted call has a reply."""

    def __init__(self, bus: Bus, limits: InboxLimits, metrics: Metrics) -> None:
        self._bus = bus
        self._limits = limits
        self._metrics = metrics
        self._calls = Tasks()
        self._listeners: list[Listener] = []
        self._draining = False
        self.counters: list[Tally] = []
        """Counters of each endpoint; always the same list, for the discovery verbs."""

    async def __aenter__(self) -> Self:
        await self._calls.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.end()
        await self._calls.__aexit__(None, None, None)

    async def open(self, endpoint: Endpoint) -> Listener:
        """Open an endpoint.

        Raises:
            Unavailable: The process is draining, or the link is down.
        """
        if self._draining:
            raise Unavailable("a draining process opens nothing", retry_after_s=0.0)
        self._listeners = [listener for listener in self._listeners if not listener.ended]
        self.counters[:] = [listener.counters for listener in self._listeners]
        tally = endpoint.counters(self._bus)
        inbox = endpoint.inbox(self._calls, self._limits, RouteMetrics(self._metrics, tally))
        subscription = await endpoint.listen(self._bus, inbox.deliver)
        listener = Listener(subscription, inbox, tally, accepts_work=endpoint.accepts_work)
        self._listeners.append(listener)
        self.counters.append(tally)
        return listener

    async def drain_work(self) -> None:
        """Close the endpoints that accept new work, and wait for running calls."""
        self._draining = True
        await self._drain([listener for listener in self._listeners if listener.accepts_work])

    async def drain(self) -> None:
        """Close all endpoints, and wait for running calls."""
        self._draining = True
        await self._drain(self._listeners)

    async def end(self) -> None:
        """Reject new calls, cancel running ones, and reply to all pending ones."""
        self._draining = True
        for listener in self._listeners:
            listener.shut()
        await self._calls.cancel(_CANCEL_S)
        for listener in self._listeners:
            await listener.close()

    async def _drain(self, listeners: list[Listener]) -> None:
        async with asyncio.TaskGroup() as group:
            for listener in listeners:
                group.create_task(listener.drain())
        await self._calls.ended()


_CANCEL_S = 2.0
