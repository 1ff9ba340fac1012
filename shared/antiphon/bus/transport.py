"""Transport of the bus: bytes on subjects, the state and errors of its link, calls of receivers."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, Self

import msgspec

from antiphon.wire.errors import EngineError, Unavailable

log = logging.getLogger(__name__)


class Packet(msgspec.Struct, frozen=True):
    """One received message."""

    subject: str
    data: bytes
    reply: str | None = None
    no_responders: bool = False  # the broker's reply that the subject has no subscribers


PacketCallback = Callable[[Packet], Awaitable[None] | None]
"""A plain function is called as soon as a message is received and must not block. A coroutine
function may wait: it costs a task, and later messages are queued, up to a bound."""


class Subscription(Protocol):
    """A subscription to a subject."""

    async def drain(self) -> None:
        """End the subscription once all messages that had arrived are processed. Idempotent."""
        ...


class LinkState:
    """Whether a transport reaches its broker, with callbacks on changes."""

    def __init__(self) -> None:
        self.up = False
        self.connect_count = 0  # how often the connection was established
        self._on_connect: list[Callable[[], Awaitable[None]]] = []
        self._on_disconnect: list[Callable[[], None]] = []

    def on_connect(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await `call` at each (re)connect from now on, after subscriptions are in place.

        Its errors are logged. It is cancelled if the link drops while it runs.
        """
        self._on_connect.append(call)

    def on_disconnect(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the link drops or is closed."""
        self._on_disconnect.append(call)

    async def mark_connected(self) -> None:
        """For the transport only, with subscriptions in place."""
        self.connect_count += 1
        self.up = True
        for call in self._on_connect:
            try:
                await call()
            except EngineError as error:
                log.warning("join callback refused", extra={"code": error.code})
            except Exception:
                # A failing callback must not break the connection.
                log.exception("join callback failed")

    def mark_disconnected(self) -> None:
        """For the transport only; idempotent."""
        if self.up:
            self.up = False
            for call in self._on_disconnect:
                call()


class Transport(Protocol):
    """Moves bytes between subjects: at-most-once delivery, ordered per publisher and subject.

    The caller enters it before any other call and leaves it last. Entering raises `BusDown` if no
    broker is reached in time. Leaving drains the subscriptions, under a deadline.
    """

    @property
    def link(self) -> LinkState: ...

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

        Raises `BusDown` if the link is down, and `RequestTooLarge` beyond the broker's limit.
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
        """Return when the broker has read all published messages, or raise `BusDown`."""
        ...


def is_async(receive: Callable[..., Awaitable[None] | None]) -> bool:
    return inspect.iscoroutinefunction(receive)


def dispatch_sync(receive: PacketCallback, packet: Packet) -> None:
    try:
        rest = receive(packet)
        assert rest is None, "a plain receiver has something to await"
    except EngineError as error:
        log.warning("receiver refused", extra={"subject": packet.subject, "code": error.code})
    except (Exception, asyncio.CancelledError):
        log.exception("receiver failed", extra={"subject": packet.subject})


async def dispatch(receive: PacketCallback, packet: Packet) -> None:
    """Call `receive` with a packet and log its errors: one message must not affect the others."""
    try:
        if (rest := receive(packet)) is not None:
            await rest
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        log.warning("receiver awaited what was cancelled", extra={"subject": packet.subject})
    except EngineError as error:
        log.warning("receiver refused", extra={"subject": packet.subject, "code": error.code})
    except Exception:
        log.exception("receiver failed", extra={"subject": packet.subject})


class BusDown(Unavailable):
    """The link to the broker is down; nothing was sent and nothing is buffered."""


class ReplyLost(Unavailable):
    """The link dropped while waiting for a reply; the call may have taken effect."""


class NoResponders(Unavailable):
    """No process listens on the subject; nothing was started."""
