"""Prometheus metrics of the services of a running stack."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus.bus import Bus, Delivery
from antiphon.bus.nats import NatsTransport
from antiphon.config.process import BusConfig
from antiphon.wire.base import Process
from antiphon.wire.ids import ClusterName, InstanceId, new_incarnation
from antiphon.wire.routes import HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.system.stack import Stack


def numbers(ports: Mapping[str, int]) -> dict[str, float]:
    """Return every sample of the services at these ports, by its name with its labels."""
    found: dict[str, float] = {}
    for port in ports.values():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            for line in reply.read().decode().splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    found[name] = float(value)
    return found


async def health_ports(stack: Stack) -> dict[str, int]:
    """Return the metrics port of each service, from its heartbeat."""
    config = msgspec.convert({"url": stack.nats_url}, BusConfig)
    here = Process(instance=InstanceId("bench"), incarnation=new_incarnation())
    ports: dict[str, int] = {}
    roles = {name.rpartition("-")[0] for name in stack.pids()}
    complete = asyncio.Event()

    async def deliver(delivery: Delivery) -> None:
        beat = delivery.read(HEARTBEAT)
        ports[beat.process.instance] = beat.health_port
        if len(ports) == len(roles):
            complete.set()

    async with Bus(NatsTransport(config, name="bench"), ClusterName("antiphon"), here) as bus:
        for role in sorted(roles):
            await bus.listen(HEARTBEAT, deliver, role=role)
        async with asyncio.timeout(10):
            await complete.wait()
    return ports
