"""What a bus stands on: bytes to subjects. NATS, memory and the fault injector implement it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, Self

import msgspec


class Packet(msgspec.Struct, frozen=True):
    """One received message.

    Attributes:
        reply: Where an answer goes, if anybody waits for one.
        nobody: True for the broker's own answer that nobody listens on the subject published to.
    """

    subject: str
    data: bytes
    reply: str | None = None
    nobody: bool = False


PacketCallback = Callable[[Packet], Awaitable[None] | None]
"""A plain function is called as soon as there is a message, and must not block. A coroutine
function may wait: it costs a task, and what comes meanwhile is queued, up to a bound."""


class Subscription(Protocol):
    """Interest in a subject."""

    async def drain(self) -> None:
        """End the interest and return when what had arrived has been received. Idempotent."""
        ...


class Link(Protocol):
    """The state of the connection to the broker."""

    @property
    def up(self) -> bool:
        """Whether the broker is reachable now."""
        ...

    @property
    def connect_count(self) -> int:
        """How often the connection was made; grows at each reconnect."""
        ...

    def on_connect(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await `call` at each join from now on, when subscriptions are in place again.

        What it raises is logged. It is cancelled if the link drops while it runs.
        """
        ...

    def on_disconnect(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the link drops, and when it is left."""
        ...


class Transport(Protocol):
    """Moves bytes between subjects, at most once, in order a publisher and subject.

    The caller enters it before any other call and leaves it last. Entering raises `BusDown` where
    no broker is found in time. Leaving drains the subscriptions, under a deadline.
    """

    @property
    def link(self) -> Link:
        """The state of the connection."""
        ...

    @property
    def payload_bytes_max(self) -> int:
        """The largest message: the smaller of our limit and the broker's."""
        ...

    @property
    def any_thread(self) -> bool:
        """Whether `publish` may be called in any thread now; if not, in the event loop's alone."""
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
        """Send to whoever listens now, without waiting until it has left.

        Nothing is buffered while the link is down: state stays with its owner. `headers` are for
        the broker; nobody who listens is told of them.

        Raises:
            BusDown: The link is down.
            RequestTooLarge: `data` is over the broker's limit.
        """
        ...

    async def subscribe(
        self, subject: str, receive: PacketCallback, queue: str | None = None
    ) -> Subscription:
        """Call `receive` for each message, one at a time, in order.

        With `queue`, only one of the subscriptions that name the same queue gets a message.
        Returns when the broker knows of it, or at once while the link is down. The subscription
        survives reconnects. What `receive` raises is logged, and the next message goes on.
        """
        ...

    async def flush(self, timeout_s: float) -> None:
        """Return when the broker has read all that was published.

        Raises:
            BusDown: It did not within `timeout_s`.
        """
        ...
