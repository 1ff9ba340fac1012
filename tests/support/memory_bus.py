"""A broker and its transports inside one process, with the semantics of core NATS.

At-most-once delivery, ordered per publisher and
subject, one member per queue group, no-responders, a payload limit; links can be cut and healed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Self

from antiphon.bus.transport import BusDown, LinkState, Packet, PacketCallback, dispatch
from antiphon.wire.errors import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


log = logging.getLogger(__name__)

PAYLOAD_BYTES_MAX = 1024 * 1024
PENDING_MESSAGES_MAX = 64 * 1024
LEAVE_TIMEOUT_S = 5.0


class MemoryBroker:
    """Routes messages to subscriptions, and cuts and heals links.

    The member of a queue group is chosen at random, as in NATS, from `seed`.
    """

    def __init__(self, *, seed: int = 0, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self.payload_bytes_max = payload_bytes_max
        self._random = random.Random(seed)  # not for secrets
        self._subscriptions: list[MemorySubscription] = []

    def cut(self, transport: MemoryTransport) -> None:
        """Take a link down: the transport neither sends nor receives. Received messages stay."""
        transport.link.mark_disconnected()

    def heal(self, transport: MemoryTransport) -> None:
        """Bring a link up again, with its subscriptions in place."""
        transport.reconnect()

    def route(self, packet: Packet, publisher: MemoryTransport) -> None:
        """Deliver a packet to the current subscribers."""
        delivered = self._deliver(packet, self._listeners(packet.subject))
        if packet.reply is not None and not delivered:
            own = (s for s in self._listeners(packet.reply) if s.transport is publisher)
            self._deliver(Packet(packet.reply, b"", no_responders=True), own)

    def add(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)

    def remove(self, subscription: MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def _listeners(self, subject: str) -> Iterable[MemorySubscription]:
        tokens = subject.split(".")
        return (s for s in self._subscriptions if s.transport.link.up and s.covers(tokens))

    def _deliver(self, packet: Packet, listeners: Iterable[MemorySubscription]) -> bool:
        queues: dict[str, list[MemorySubscription]] = {}
        delivered = False
        for listener in listeners:
            delivered = True
            if listener.queue is None:
                listener.put(packet)
            else:
                queues.setdefault(listener.queue, []).append(listener)
        for members in queues.values():
            self._random.choice(members).put(packet)
        return delivered


class MemoryTransport:
    """One link to a `MemoryBroker`. Implements `Transport`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self.link = LinkState()
        self._group = asyncio.TaskGroup()
        self._subscriptions: dict[MemorySubscription, asyncio.Task[None]] = {}

    any_thread = False  # receivers are tasks of the event loop

    @property
    def payload_bytes_max(self) -> int:
        return self._broker.payload_bytes_max

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        await self.link.mark_connected()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                for subscription in tuple(self._subscriptions):
                    await subscription.drain()
        except TimeoutError:
            log.warning("bus left before it was drained")
        finally:
            self.link.mark_disconnected()
            for subscription, pump in self._subscriptions.items():
                self._broker.remove(subscription)
                pump.cancel()
            await self._group.__aexit__(None, None, None)

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str | None = None,
        headers: Mapping[str, str] | None = None,  # ignored: there is no JetStream
    ) -> None:
        if len(data) > self.payload_bytes_max:
            raise RequestTooLarge.of(size_bytes=len(data), bytes_max=self.payload_bytes_max)
        self._check_link()
        self._broker.route(Packet(subject, data, reply), self)

    async def subscribe(
        self, subject: str, receive: PacketCallback, queue: str | None = None
    ) -> MemorySubscription:
        subscription = MemorySubscription(self, subject, queue)
        self._broker.add(subscription)
        self._subscriptions[subscription] = self._group.create_task(subscription.pump(receive))
        return subscription

    async def flush(self, timeout_s: float) -> None:
        """Return at once: messages are routed when published."""
        self._check_link()

    async def end(self, subscription: MemorySubscription) -> None:
        """End a subscription once all messages that had arrived are processed."""
        self._broker.remove(subscription)
        await subscription.wait_empty()
        pump = self._subscriptions.pop(subscription, None)
        if pump is not None:
            pump.cancel()

    def reconnect(self) -> None:
        """Bring the link up again. For the broker only."""
        if not self.link.up:
            self._group.create_task(self.link.mark_connected())

    def _check_link(self) -> None:
        if not self.link.up:
            raise BusDown("the NATS connection is down", retry_after_s=1.0)


class MemorySubscription:
    """Subscription to a subject of a `MemoryBroker`. Implements `Subscription`."""

    def __init__(self, transport: MemoryTransport, subject: str, queue: str | None) -> None:
        self.transport = transport
        self.queue = queue
        self._tokens = subject.split(".")
        self._packets: asyncio.Queue[Packet] = asyncio.Queue(PENDING_MESSAGES_MAX)

    def covers(self, tokens: list[str]) -> bool:
        """Whether a subject, split into tokens, matches the subscription."""
        for index, expected in enumerate(self._tokens):
            if expected == ">":
                return len(tokens) > index
            if index == len(tokens) or expected not in ("*", tokens[index]):
                return False
        return len(tokens) == len(self._tokens)

    def put(self, packet: Packet) -> None:
        """Queue a packet, or drop it if the receiver is too slow."""
        try:
            self._packets.put_nowait(packet)
        except asyncio.QueueFull:
            log.warning("slow receiver lost a message", extra={"subject": packet.subject})

    async def pump(self, receive: PacketCallback) -> None:
        """Call `receive` with each packet, one at a time, until cancelled."""
        while True:
            packet = await self._packets.get()
            try:
                await dispatch(receive, packet)
            finally:
                self._packets.task_done()

    async def wait_empty(self) -> None:
        await self._packets.join()

    async def drain(self) -> None:
        await self.transport.end(self)
