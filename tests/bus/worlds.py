"""The brokers that one suite runs against, and what tests wait with."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from tests.support.faulty_transport import FaultyTransport
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.nats import NatsServer
from tests.support.nats_link import linked
from tests.support.wait import until

from antiphon.bus.nats import NatsTransport
from antiphon.config.settings import BusConfig

if TYPE_CHECKING:
    from antiphon.bus.transport import Packet, Transport

WAIT_S = 10.0


async def flood(transport: Transport) -> None:
    """Publish until the transport refuses; the broker reads nothing, so it must."""
    async with asyncio.timeout(WAIT_S):
        while True:
            transport.publish("news", b"x" * 1024 * 1024)
            await asyncio.sleep(0)


class Mailbox:
    """Receives packets and keeps them; `wait` returns when there are so many."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []

    @property
    def data(self) -> list[bytes]:
        return [packet.data for packet in self.packets]

    async def receive(self, packet: Packet) -> None:
        self.packets.append(packet)

    def receive_sync(self, packet: Packet) -> None:
        self.packets.append(packet)

    async def wait(self, count: int) -> list[bytes]:
        await until(lambda: len(self.packets) >= count)
        return self.data


async def mailbox(transport: Transport, subject: str, *, plain: bool = False) -> Mailbox:
    box = Mailbox()
    await transport.subscribe(subject, box.receive_sync if plain else box.receive)
    return box


class World(ABC):
    """A broker and transports to it; entered by the fixture, which leaves all of them."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.transports: list[Transport] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stack.aclose()

    async def join(self) -> Transport:
        transport = await self.stack.enter_async_context(self.make())
        self.transports.append(transport)
        return transport

    @abstractmethod
    def make(self) -> Transport: ...

    @abstractmethod
    async def cut(self) -> None:
        """Take the broker down for all transports."""

    @abstractmethod
    async def heal(self) -> None:
        """Bring it back."""


class NatsWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.server = NatsServer()

    async def __aenter__(self) -> Self:
        await self.stack.enter_async_context(self.server)
        return self

    def make(self) -> NatsTransport:
        return NatsTransport(bus_config(self.server.url), name="test")

    async def cut(self) -> None:
        await self.server.kill()
        await until(lambda: not any(t.link.up for t in self.transports))

    async def heal(self) -> None:
        await self.server.start()
        await until(lambda: all(t.link.up for t in self.transports))


class LinkedWorld(NatsWorld):
    """The proxy without faults must be indistinguishable from the broker behind it."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.link = await self.stack.enter_async_context(linked(self.server.url))
        return self

    def make(self) -> NatsTransport:
        return NatsTransport(bus_config(self.link.url), name="test")

    async def cut(self) -> None:
        self.link.cut()
        await until(lambda: not any(t.link.up for t in self.transports))

    async def heal(self) -> None:
        self.link.up = True
        await until(lambda: all(t.link.up for t in self.transports))


class MemoryWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.broker = MemoryBroker()
        self.links: list[MemoryTransport] = []

    def make(self) -> Transport:
        self.links.append(MemoryTransport(self.broker))
        return self.links[-1]

    async def cut(self) -> None:
        for link in self.links:
            self.broker.cut(link)

    async def heal(self) -> None:
        for link in self.links:
            self.broker.heal(link)
        await until(lambda: all(t.link.up for t in self.transports))


class FaultlessWorld(MemoryWorld):
    """The fault injector with no faults must be indistinguishable from the transport it wraps."""

    def make(self) -> Transport:
        return FaultyTransport(super().make())


WORLDS = {"nats": NatsWorld, "linked": LinkedWorld, "memory": MemoryWorld, "faulty": FaultlessWorld}


def bus_config(url: str, **changes: float | str) -> BusConfig:
    """Pauses short enough for tests."""
    return BusConfig(**{"url": url, "reconnect_wait_s": 0.02, "connect_timeout_s": 0.5, **changes})
