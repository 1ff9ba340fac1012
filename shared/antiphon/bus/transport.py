"""Transport protocol of the bus: bytes on subjects. Implemented by NATS, memory and faults."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, Self

import msgspec


class Packet(msgspec.Struct, frozen=True):
    """One received message.

    Attributes:
        reply: Subject for the reply, if the sender expects one.
        no_responders: Whether this is the broker's reply that the subject has no subscribers.
    """

    subject: str
    data: bytes
    reply: str | None = None
    no_responders: bool = False


PacketCallback = Callable[[Packet], Awaitable[None] | None]
"""A plain function is called as soon as a message is received and must not block. A coroutine
function may wait: it costs a task, and later messages are queued, up to a bound."""


class Subscription(Protocol):
    """A subscription to a subject."""

    async def drain(self) -> None:
        """End the subscription once all messages that had arrived are processed. Idempotent."""
        ...


class Link(Protocol):
    """State of the connection to the broker."""

    @property
    def up(self) -> bool:
        """Whether the broker is reachable now."""
        ...

    @property
    def connect_count(self) -> int:
        """Number of times the connection was established; increases at each reconnect."""
        ...

    def on_connect(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await `call` at each (re)connect from now on, after subscriptions are in place.

        Its errors are logged. It is cancelled if the link drops while it runs.
        """
        ...

    def on_disconnect(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the link drops or is closed."""
        ...


class Transport(Protocol):
    """Moves bytes between subjects: at-most-once delivery, ordered per publisher and subject.

    The caller enters it before any other call and leaves it last. Entering raises `BusDown` if no
    broker is reached in time. Leaving drains the subscriptions, under a deadline.
    """

    @property
    def link(self) -> Link:
        """State of the connection."""
        ...

    @property
    def payload_bytes_max(self) -> int:
        """Maximum size of a message: the smaller of our limit and the broker's."""
        ...

    @property
    def any_thread(self) -> bool:
        """Whether `publish` may be called from any thread now, or only from the event loop's."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send to the current subscribers, without waiting for the write.

        Nothing is buffered while the link is down: state stays with its owner. `headers` are for
        the broker; subscribers do not see them.

        Raises:
            BusDown: The link is down.
            RequestTooLarge: `data` exceeds the broker's limit.
        """
        ...

    async def subscribe(
        self, subject: str, receive: PacketCallback, queue: str | None = None
    ) -> Subscription:
        """Call `receive` for each message, one at a time, in order.

        With `queue`, only one subscription of the same queue group receives a message. Returns when
        the broker has registered it, or at once while the link is down. The subscription survives
        reconnects. Errors of `receive` are logged and do not affect later messages.
        """
        ...

    async def flush(self, timeout_s: float) -> None:
        """Return when the broker has read all published messages.

        Raises:
            BusDown: It has not within `timeout_s`.
        """
        ...
