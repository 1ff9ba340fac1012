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
    from tests.system.stack import Stack


def scrape(url: str) -> dict[str, float]:
    """Return every sample of a service, by its name with its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


async def metrics_urls(stack: Stack) -> dict[str, str]:
    """Return where each service shows its metrics, from its heartbeat."""
    config = msgspec.convert({"url": stack.nats_url}, BusConfig)
    here = Process(instance=InstanceId("bench"), incarnation=new_incarnation())
    urls: dict[str, str] = {}
    roles = {name.rpartition("-")[0] for name in stack.pids()}
    complete = asyncio.Event()

    async def deliver(delivery: Delivery) -> None:
        beat = delivery.read(HEARTBEAT)
        urls[beat.process.instance] = f"http://127.0.0.1:{beat.health_port}"
        if len(urls) == len(roles):
            complete.set()

    async with Bus(NatsTransport(config, name="bench"), ClusterName("antiphon"), here) as bus:
        for role in sorted(roles):
            await bus.listen(HEARTBEAT, deliver, role=role)
        async with asyncio.timeout(10):
            await complete.wait()
    return urls
