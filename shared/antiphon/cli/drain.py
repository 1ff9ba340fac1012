"""`antiphon drain`: move the requests of a running worker to others, so that it can be stopped."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from msgspec.structs import replace

from antiphon.bus.bus import Bus
from antiphon.bus.nats import NatsTransport
from antiphon.bus.transport import BusDown
from antiphon.cli.settings import load_arguments
from antiphon.config.errors import ConfigError
from antiphon.wire.base import Process, Role
from antiphon.wire.command import DrainWorker
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import ClusterName, InstanceId, new_incarnation
from antiphon.wire.routes import HEARTBEAT, OPERATOR, WORKER_CONTROL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.bus.bus import Delivery
    from antiphon.config.settings import Settings

FAILED = 1
CALL_TIMEOUT_S = 5.0
LOCAL_URL = "nats://127.0.0.1:4222"
"""Where `antiphon serve` starts its NATS server, unless the port is taken."""


def main(argv: Sequence[str]) -> int:
    """Drain one worker; return when it holds no running request, with the exit status."""
    summary = (
        "Drain a worker, such as worker-0: it takes no new requests, and those that it runs "
        "continue on other workers. It goes on to run and can be stopped then."
    )
    if not argv or argv[0].startswith("-"):
        load_arguments("antiphon drain INSTANCE", summary, argv)
        raise ConfigError("antiphon drain needs the name of a worker, such as worker-0")
    instance, *rest = argv
    settings = load_arguments("antiphon drain INSTANCE", summary, rest).settings
    try:
        return asyncio.run(_drain(InstanceId(instance), settings))
    except BusDown as error:
        print(f"antiphon drain: no NATS server responds: {error}", file=sys.stderr)
    except EngineError as error:
        print(f"antiphon drain: {instance}: {error.message}", file=sys.stderr)
    except TimeoutError:
        text = f"still runs requests after {settings.service.drain_timeout_s:g} s"
        print(f"antiphon drain: {instance} {text}", file=sys.stderr)
    return FAILED


async def _drain(instance: InstanceId, settings: Settings) -> int:
    config = replace(settings.bus, url=settings.bus.url or LOCAL_URL)
    name = InstanceId(f"drain-{os.getpid()}")
    bus = Bus(
        NatsTransport(config, name=name),
        ClusterName(settings.cluster.name),
        Process(instance=name, incarnation=new_incarnation()),
        party=OPERATOR,
    )
    drained, called = asyncio.Event(), False

    async def deliver(delivery: Delivery) -> None:
        load = delivery.read(HEARTBEAT).worker
        if called and load is not None and not load.live:
            drained.set()

    async with bus:
        await bus.listen(HEARTBEAT, deliver, role=Role.WORKER, instance=instance)
        drain = DrainWorker(migrate=True)
        await bus.call(WORKER_CONTROL, drain, timeout_s=CALL_TIMEOUT_S, worker=instance)
        called = True
        async with asyncio.timeout(settings.service.drain_timeout_s):
            await drained.wait()
    print(f"{instance} runs no requests")
    return 0
