"""What a service does with a route: answer its calls, or follow its feed."""

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
        """Whether it takes new work, and so is closed first when the process drains."""
        ...

    def inbox(self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics) -> Inbox:
        """Make what its messages are delivered to."""
        ...

    def counters(self, bus: Bus) -> Tally:
        """Make what the discovery verbs tell of it."""
        ...

    async def listen(self, bus: Bus, deliver: DeliveryCallback) -> Subscription:
        """Have its messages delivered."""
        ...


@dataclass(frozen=True, kw_only=True)
class RequestEndpoint(Generic[Q, R]):
    """Answer each call of a route. Calls run beside each other, in slots, behind a bounded queue.

    Attributes:
        handler: Returns the reply, or raises an `EngineError`, which is the reply then. It gets
            the delivery too, for routes that go on speaking to the caller (`generate`).
        address: Parts of the subject; what is left out is listened to whatever it is.
        while_draining: The calls are about work accepted before (cancel, resume), so they are
            taken until the drain is over. Others are refused from its beginning.
    """

    route: RequestRoute[Q, R]
    handler: Callable[[Q, Delivery], Awaitable[R]]
    address: Mapping[str, str] = field(default_factory=dict[str, str])
    while_draining: bool = False

    @property
    def accepts_work(self) -> bool:
        """Whether a draining process stops listening to it at once."""
        return not self.while_draining

    def inbox(self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics) -> Inbox:
        """Answer each call in a task of its own."""
        return RequestInbox(
            self.route.name, self._handle, calls=calls, limits=limits, counts=counts
        )

    def counters(self, bus: Bus) -> Tally:
        """Name the route and its subject."""
        return _counters(self.route, bus, self.address)

    async def listen(self, bus: Bus, deliver: DeliveryCallback) -> Subscription:
        """Subscribe to the route."""
        return await bus.listen(self.route, deliver, **self.address)

    async def _handle(self, delivery: Delivery) -> R:
        message = delivery.read(self.route)
        # Not restored: the task is this call's own, and what is logged after it should say so too.
        request_id_var.set(_text(message, "request_id"))
        with span(self.route.name, _text(message, "traceparent")):
            return await self.handler(message, delivery)


@dataclass(frozen=True, kw_only=True)
class StreamEndpoint(Generic[Q]):
    """Apply each message of a feed, one at a time, in order.

    `apply` cannot wait: nothing comes between looking at a sequence number and applying the
    message, and a message costs no task. A malformed message is logged, counted and dropped. A
    draining process follows its feeds until the drain is over: what runs still needs them.
    """

    route: Route[Q]
    apply: Callable[[Q], None]
    address: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def accepts_work(self) -> bool:
        """Never: what is accepted comes by calls."""
        return False

    def inbox(self, calls: asyncio.TaskGroup, limits: InboxLimits, counts: RouteMetrics) -> Inbox:
        """Apply each message where it arrives."""
        return StreamInbox(self.route.name, self._apply, calls=calls, counts=counts)

    def counters(self, bus: Bus) -> Tally:
        """Name the route and its subject."""
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
    """A field that most requests have and that logs and traces want."""
    return getattr(message, name, None)
