"""A broker and its transports inside one process, with the semantics of core NATS.

For tests, simulations and a system that runs in one process. At most once, in order a publisher and
subject, one member a queue, no-responders, a payload limit; links that go down and up at will.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Self

from antiphon.bus.dispatch import dispatch
from antiphon.bus.errors import BusDown
from antiphon.bus.link import LinkState
from antiphon.bus.transport import Packet
from antiphon.wire.errors import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from antiphon.bus.transport import PacketCallback

log = logging.getLogger(__name__)

PAYLOAD_BYTES_MAX = 1024 * 1024
PENDING_MESSAGES_MAX = 64 * 1024
LEAVE_TIMEOUT_S = 5.0


class MemoryBroker:
    """Knows who listens to what, and takes links down and up.

    A queue's member is drawn at random, as in NATS, from `seed`.
    """

    def __init__(self, *, seed: int = 0, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self.payload_bytes_max = payload_bytes_max
        self._random = random.Random(seed)  # noqa: S311  # who is chosen is no secret
        self._subscriptions: list[MemorySubscription] = []

    def cut(self, transport: MemoryTransport) -> None:
        """Take a link down: the transport neither sends nor receives. What it has, it has."""
        transport.link.mark_disconnected()

    def heal(self, transport: MemoryTransport) -> None:
        """Take a link up again, with its subscriptions in place."""
        transport.reconnect()

    def route(self, packet: Packet, publisher: MemoryTransport) -> None:
        """Give a packet to whoever listens now."""
        heard = self._deliver(packet, self._listeners(packet.subject))
        if packet.reply is not None and not heard:
            own = (s for s in self._listeners(packet.reply) if s.transport is publisher)
            self._deliver(Packet(packet.reply, b"", nobody=True), own)

    def add(self, subscription: MemorySubscription) -> None:
        """Begin an interest."""
        self._subscriptions.append(subscription)

    def remove(self, subscription: MemorySubscription) -> None:
        """End an interest, if there is one."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def _listeners(self, subject: str) -> Iterable[MemorySubscription]:
        tokens = subject.split(".")
        return (s for s in self._subscriptions if s.transport.link.up and s.covers(tokens))

    def _deliver(self, packet: Packet, listeners: Iterable[MemorySubscription]) -> bool:
        queues: dict[str, list[MemorySubscription]] = {}
        heard = False
        for listener in listeners:
            heard = True
            if listener.queue is None:
                listener.put(packet)
            else:
                queues.setdefault(listener.queue, []).append(listener)
        for members in queues.values():
            self._random.choice(members).put(packet)
        return heard


class MemoryTransport:
    """One link to a `MemoryBroker`. Implements `Transport`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._link = LinkState()
        self._group = asyncio.TaskGroup()
        self._subscriptions: dict[MemorySubscription, asyncio.Task[None]] = {}

    @property
    def link(self) -> LinkState:
        """The state of the connection."""
        return self._link

    @property
    def payload_bytes_max(self) -> int:
        """The largest message."""
        return self._broker.payload_bytes_max

    @property
    def any_thread(self) -> bool:
        """No: receivers are tasks of the event loop."""
        return False

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        await self._link.mark_connected()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                for subscription in tuple(self._subscriptions):
                    await subscription.drain()
        except TimeoutError:
            log.warning("bus left before it was drained")
        finally:
            self._link.mark_disconnected()
            for subscription, pump in self._subscriptions.items():
                self._broker.remove(subscription)
                pump.cancel()
            await self._group.__aexit__(None, None, None)

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str | None = None,
        headers: Mapping[str, str] | None = None,  # nobody is there to read them
    ) -> None:
        """Send to whoever listens now."""
        if len(data) > self.payload_bytes_max:
            raise RequestTooLarge.of(size_bytes=len(data), bytes_max=self.payload_bytes_max)
        self._check_link()
        self._broker.route(Packet(subject, data, reply), self)

    async def subscribe(
        self, subject: str, receive: PacketCallback, queue: str | None = None
    ) -> MemorySubscription:
        """Call `receive` for each message, one at a time, in order."""
        subscription = MemorySubscription(self, subject, queue)
        self._broker.add(subscription)
        self._subscriptions[subscription] = self._group.create_task(subscription.pump(receive))
        return subscription

    async def flush(self, timeout_s: float) -> None:
        """Return at once: the broker reads as we publish."""
        self._check_link()

    async def end(self, subscription: MemorySubscription) -> None:
        """End an interest when what had arrived was received."""
        self._broker.remove(subscription)
        await subscription.wait_empty()
        pump = self._subscriptions.pop(subscription, None)
        if pump is not None:
            pump.cancel()

    def reconnect(self) -> None:
        """Make the link again. For the broker only."""
        if not self._link.up:
            self._group.create_task(self._link.mark_connected())

    def _check_link(self) -> None:
        if not self._link.up:
            raise BusDown("the NATS connection is down", retry_after_s=1.0)


class MemorySubscription:
    """Interest in a subject of a `MemoryBroker`. Implements `Subscription`."""

    def __init__(self, transport: MemoryTransport, subject: str, queue: str | None) -> None:
        self.transport = transport
        self.queue = queue
        self._tokens = subject.split(".")
        self._packets: asyncio.Queue[Packet] = asyncio.Queue(PENDING_MESSAGES_MAX)

    def covers(self, tokens: list[str]) -> bool:
        """Whether a subject, split into tokens, is one of those listened to."""
        for index, wanted in enumerate(self._tokens):
            if wanted == ">":
                return len(tokens) > index
            if index == len(tokens) or wanted not in ("*", tokens[index]):
                return False
        return len(tokens) == len(self._tokens)

    def put(self, packet: Packet) -> None:
        """Take a packet, or lose it where the receiver is too slow."""
        try:
            self._packets.put_nowait(packet)
        except asyncio.QueueFull:
            log.warning("slow receiver lost a message", extra={"subject": packet.subject})

    async def pump(self, receive: PacketCallback) -> None:
        """Let `receive` have the packets, one at a time, until cancelled."""
        while True:
            packet = await self._packets.get()
            try:
                await dispatch(receive, packet)
            finally:
                self._packets.task_done()

    async def wait_empty(self) -> None:
        """Return when all that arrived has been received."""
        await self._packets.join()

    async def drain(self) -> None:
        """End the interest and return when what had arrived has been received. Idempotent."""
        await self.transport.end(self)
