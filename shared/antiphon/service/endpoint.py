"""Endpoints of a service: handlers of calls and of feeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from antiphon.bus.discovery import EndpointCounters as Tally
from antiphon.service.inbox import Inbox, InboxLimits, RequestInbox, StreamInbox
from antiphon.telemetry.context import request_id_var
from antiphon.telemetry.tracing import span
from antiphon.wire.base import Message
from antiphon.wire.routes import DeliveryMode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from antiphon.bus.bus import Bus, Delivery, DeliveryCallback
    from antiphon.bus.transport import Subscription
    from antiphon.service.route_metrics import RouteMetrics
    from antiphon.wire.routes import RequestRoute, Route

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class Endpoint(Protocol):
    """A route and its handler: a `RequestEndpoint` or a `StreamEndpoint`."""

    @property
    def accepts_work(self) -> bool:
        """Whether it accepts new work, and so is closed first when the process drains."""
        ...

    def inbox(self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics) -> Inbox:
        """Create the inbox for its messages."""
        ...

    def counters(self, bus: Bus) -> Tally:
        """Create its counters for the discovery verbs."""
        ...

    async def listen(self, bus: Bus, deliver: DeliveryCallback) -> Subscription:
        """Subscribe to the route."""
        ...


@dataclass(frozen=True, kw_only=True)
class RequestEndpoint(Generic[Q, R]):
    """Handler of the calls of a route. Calls run concurrently in slots behind a bounded queue.

    Attributes:
        handler: Returns the reply, or raises an `EngineError`, which is sent as the reply. It gets
            the delivery, too, for routes that send more messages to the caller (`generate`).
        address: Parts of the subject; missing parts are wildcards.
        while_draining: The calls concern work accepted before (cancel, resume), so they are
            accepted until the drain ends. Others are rejected from its start.
    """

    route: RequestRoute[Q, R]
    handler: Callable[[Q, Delivery], Awaitable[R]]
    address: Mapping[str, str] = field(default_factory=dict[str, str])
    while_draining: bool = False

    @property
    def accepts_work(self) -> bool:
        """Whether a draining process unsubscribes from it at once."""
        return not self.while_draining

    def inbox(self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics) -> Inbox:
        """Create an inbox that handles each call in its own task."""
        return RequestInbox(
            self.route.name, self._handle, calls=calls, limits=limits, counts=counts
        )

    def counters(self, bus: Bus) -> Tally:
        """Create counters with the route's name and subject."""
        return _counters(self.route, bus, self.address)

    async def listen(self, bus: Bus, deliver: DeliveryCallback) -> Subscription:
        """Subscribe to the route."""
        return await bus.listen(self.route, deliver, **self.address)

    async def _handle(self, delivery: Delivery) -> R:
        message = delivery.read(self.route)
        # Not reset: the task belongs to this call, and later log lines should have the id, too.
        request_id_var.set(_text(message, "request_id"))
        with span(self.route.name, _text(message, "traceparent")):
            return await self.handler(message, delivery)


@dataclass(frozen=True, kw_only=True)
class StreamEndpoint(Generic[Q]):
    """Handler of a feed: applies its messages one at a time, in order.

    `apply` is not a coroutine: nothing runs between checking a sequence number and applying the
    message, and a message costs no task. Malformed messages are logged, counted and dropped. A
    draining process keeps its feeds until the drain ends: running requests still need them.
    """

    route: Route[Q]
    apply: Callable[[Q], None]
    address: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def accepts_work(self) -> bool:
        """False: new work arrives by calls only."""
        return False

    def inbox(self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics) -> Inbox:
        """Create an inbox that applies each message on arrival."""
        return StreamInbox(self.route.name, self._apply, calls=calls, counts=counts)

    def counters(self, bus: Bus) -> Tally:
        """Create counters with the route's name and subject."""
        return _counters(self.route, bus, self.address)

    async def listen(self, bus: Bus, deliver: DeliveryCallback) -> Subscription:
        """Subscribe to the route."""
        return await bus.listen(self.route, deliver, **self.address)

    def _apply(self, delivery: Delivery) -> None:
        self.apply(delivery.read(self.route))


def _counters(route: Route[Q], bus: Bus, address: Mapping[str, str]) -> Tally:
    queue = str(route.listeners[0]) if route.delivery is DeliveryMode.QUEUE else ""
    return Tally(name=route.name, subject=bus.subject(route, **address), queue=queue)


def _text(message: Message, name: str) -> str | None:
    """Return a field that most requests have, for logs and traces."""
    return getattr(message, name, None)
