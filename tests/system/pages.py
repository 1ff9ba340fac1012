"""How many pages the worker of a running stack has in use, by its own word."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus.bus import Bus, Delivery
from antiphon.bus.nats import NatsTransport
from antiphon.config.settings import BusConfig
from antiphon.wire.base import Process, Role
from antiphon.wire.ids import ClusterName, InstanceId, new_incarnation
from antiphon.wire.routes import HEARTBEAT

if TYPE_CHECKING:
    from tests.system.stack import Stack

    from antiphon.wire.heartbeat import Heartbeat


def pages_in_use(stack: Stack) -> int:
    """Wait for the worker's next heartbeat and ask it."""
    return asyncio.run(_pages_in_use(stack.nats_url))


async def _pages_in_use(nats_url: str) -> int:
    config = msgspec.convert({"url": nats_url}, BusConfig)
    here = Process(instance=InstanceId("test"), incarnation=new_incarnation())
    heard: asyncio.Queue[Heartbeat] = asyncio.Queue()

    async def deliver(delivery: Delivery) -> None:
        heard.put_nowait(delivery.read(HEARTBEAT))

    bus = Bus(NatsTransport(config, name="test"), ClusterName("antiphon"), here)
    async with bus, asyncio.timeout(10):
        await bus.listen(HEARTBEAT, deliver, role=Role.WORKER)
        load = (await heard.get()).worker
    assert load is not None
    return load.pages_total - load.pages_free
