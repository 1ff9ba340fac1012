"""Endpoints of a service, handlers of calls and of feeds; and the open ones of a process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from antiphon.bus.discovery import EndpointCounters
from antiphon.service.inbox import Inbox, InboxLimits, RequestInbox, RouteMetrics, StreamInbox
from antiphon.service.tasks import Tasks
from antiphon.telemetry.tracing import request_id_var, span
from antiphon.wire.base import Message
from antiphon.wire.errors import Unavailable
from antiphon.wire.routes import DeliveryMode, RequestRoute, Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from antiphon.bus.bus import Bus, Delivery, DeliveryCallback
    from antiphon.bus.transport import Subscription
    from antiphon.telemetry.metrics import Metrics

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

_CANCEL_S = 2.0


class Endpoint(Protocol):
    @property
    def accepts_work(self) -> bool: ...

    def inbox(
        self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics
    ) -> Inbox: ...

    def counters(self, bus: Bus) -> EndpointCounters: ...

    async def listen(self, bus: Bus, deliver: DeliveryCallback) -> Subscription: ...


@dataclass(frozen=True, kw_only=True)
class _RouteEndpoint(Generic[Q]):
    route: Route[Q]
    # Parts of the subject; missing parts are wildcards.
    address: Mapping[str, str] = field(default_factory=dict[str, str])

    def counters(self, bus: Bus) -> EndpointCounters:
        route, subject = self.route, bus.subject(self.route, **self.address)
        queue = str(route.listeners[0]) if route.delivery is DeliveryMode.QUEUE else ""
        return EndpointCounters(name=route.name, subject=subject, queue=queue)

    async def listen(self, bus: Bus, deliver: DeliveryCallback) -> Subscription:
        return await bus.listen(self.route, deliver, **self.address)


@dataclass(frozen=True, kw_only=True)
class RequestEndpoint(_RouteEndpoint[Q], Generic[Q, R]):
    """Handler of the calls of a route. Calls run concurrently in slots behind a bounded queue."""

    route: RequestRoute[Q, R]
    # Returns the reply, or raises an `EngineError`, which is sent as the reply. It gets the
    # delivery, too, for routes that send more messages to the caller (`generate`).
    handler: Callable[[Q, Delivery], Awaitable[R]]
    # The calls concern work accepted before (cancel, resume), so they are accepted until the drain
    # ends. Others are rejected from its start.
    while_draining: bool = False
    # The handler lets calls wait by itself, as where tenants take turns: it gets as many at once
    # as are accepted. Others get them in order, as many at once as there are slots.
    admits_all: bool = False

    @property
    def accepts_work(self) -> bool:
        return not self.while_draining

    def inbox(self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics) -> Inbox:
        if self.admits_all:
            limits = InboxLimits(slots=limits.slots + limits.backlog, backlog=0)
        return RequestInbox(
            self.route.name, self._handle, calls=calls, limits=limits, counts=counts
        )

    async def _handle(self, delivery: Delivery) -> R:
        message = delivery.read(self.route)
        # Not reset: the task belongs to this call, and later log lines should have the id, too.
        request_id_var.set(getattr(message, "request_id", None))
        with span(self.route.name, getattr(message, "traceparent", None)):
            return await self.handler(message, delivery)


@dataclass(frozen=True, kw_only=True)
class StreamEndpoint(_RouteEndpoint[Q]):
    """Handler of a feed: applies its messages one at a time, in order.

    `apply` is not a coroutine: nothing runs between checking a sequence number and applying the
    message, and a message costs no task. Malformed messages are logged, counted and dropped. A
    draining process keeps its feeds until the drain ends: running requests still need them.
    """

    apply: Callable[[Q], None]

    @property
    def accepts_work(self) -> bool:
        return False

    def inbox(self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics) -> Inbox:
        return StreamInbox(self.route.name, self._apply, calls=calls, counts=counts)

    def _apply(self, delivery: Delivery) -> None:
        self.apply(delivery.read(self.route))


@dataclass(eq=False, kw_only=True)
class Listener:
    """An open endpoint. Implements `Subscription`: draining ends it."""

    subscription: Subscription
    inbox: Inbox
    counters: EndpointCounters
    accepts_work: bool
    drained: bool = False

    @property
    def ended(self) -> bool:
        return self.drained and self.inbox.empty

    async def drain(self) -> None:
        """Unsubscribe; messages that had arrived are still accepted, later ones rejected."""
        await self.subscription.drain()
        self.inbox.shut()
        self.drained = True


class Listeners:
    """Opens endpoints and runs their calls. On exit, every accepted call has a reply."""

    def __init__(self, bus: Bus, limits: InboxLimits, metrics: Metrics) -> None:
        self._bus = bus
        self._limits = limits
        self._metrics = metrics
        self._calls = Tasks()
        self._listeners: list[Listener] = []
        self._draining = False
        self.counters: list[EndpointCounters] = []
        """Counters of each endpoint; always the same list, for the discovery verbs."""

    async def __aenter__(self) -> Self:
        await self._calls.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.end()
        await self._calls.__aexit__(None, None, None)

    async def open(self, endpoint: Endpoint) -> Listener:
        """Open an endpoint. Raises `Unavailable` in a draining process, or if the link is down."""
        if self._draining:
            raise Unavailable("a draining process opens nothing", retry_after_s=0.0)
        self._listeners = [listener for listener in self._listeners if not listener.ended]
        self.counters[:] = [listener.counters for listener in self._listeners]
        counters = endpoint.counters(self._bus)
        inbox = endpoint.inbox(self._calls, self._limits, RouteMetrics(self._metrics, counters))
        listener = Listener(
            subscription=await endpoint.listen(self._bus, inbox.deliver),
            inbox=inbox,
            counters=counters,
            accepts_work=endpoint.accepts_work,
        )
        self._listeners.append(listener)
        self.counters.append(counters)
        return listener

    async def drain_work(self) -> None:
        await self._drain([listener for listener in self._listeners if listener.accepts_work])

    async def drain(self) -> None:
        await self._drain(self._listeners)

    async def end(self) -> None:
        """Reject new calls, cancel running ones, and reply to all pending ones."""
        self._draining = True
        for listener in self._listeners:
            listener.inbox.shut()
        await self._calls.cancel(_CANCEL_S)
        for listener in self._listeners:
            await listener.inbox.close()

    async def _drain(self, listeners: list[Listener]) -> None:
        self._draining = True
        async with asyncio.TaskGroup() as group:
            for listener in listeners:
                group.create_task(listener.drain())
        await self._calls.ended()
