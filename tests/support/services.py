"""A service running in this process, on a bus of the test's choice."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.support.wait import until

from antiphon.bus.bus import Bus
from antiphon.config.process import HealthConfig, ServiceConfig
from antiphon.config.settings import Settings
from antiphon.service.clock import Clock, SystemClock
from antiphon.service.run import ProcessContext, serve
from antiphon.wire.base import Process, ProcessState
from antiphon.wire.ids import ClusterName, Incarnation, InstanceId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.bus.transport import Transport
    from antiphon.service.health import ProcessHealth
    from antiphon.service.service import Service
    from antiphon.telemetry.metrics import Metrics
    from antiphon.wire.routes import Party

CLUSTER = ClusterName("test")
QUICK = Settings(
    service=ServiceConfig(heartbeat_s=0.05, drain_timeout_s=5.0),
    health=HealthConfig(host="127.0.0.1", port=0),
)
"""Settings of a test: the defaults, with quick heartbeats."""


class Running:
    """A service under test. Leaving `running` stops it, if the test has not."""

    def __init__(self, service: Service, around: ProcessContext) -> None:
        self.around = around
        self.stop = asyncio.Event()
        self.gone = asyncio.Event()
        self._service = service
        self._failure: Exception | None = None

    @property
    def health(self) -> ProcessHealth:
        """Its state."""
        return self.around.health

    @property
    def metrics(self) -> Metrics:
        """What it has counted."""
        return self.around.metrics

    @property
    def process(self) -> Process:
        """Who it is."""
        return self.around.bus.process

    async def live(self) -> None:
        """Serve until stopped; a failure is kept for `ended`."""
        try:
            await serve(self._service, self.around, self.stop)
        except Exception as error:  # noqa: BLE001  # as main does
            self._failure = error
        finally:
            self.gone.set()

    async def ended(self, timeout_s: float = 10.0) -> None:
        """Stop it and wait until it has left. Raises what ended it, once."""
        self.stop.set()
        async with asyncio.timeout(timeout_s):
            await self.gone.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


@asynccontextmanager
async def running(
    service: Service,
    transport: Transport,
    *,
    settings: Settings = QUICK,
    instance: str = "",
    incarnation: str = "1",
    clock: Clock | None = None,
    ready: bool = True,
) -> AsyncGenerator[Running]:
    """Run a service until the block ends. What it raised is raised then, unless `ended` has.

    Args:
        service: Not entered yet.
        transport: Its own link to the broker, not entered yet.
        settings: `QUICK` unless given.
        instance: `<role>-0` unless given.
        incarnation: Give another to a service that runs again.
        clock: The system's unless given.
        ready: Whether the block begins when the service is ready, or at once.
    """
    process = Process(
        instance=InstanceId(instance or f"{service.role}-0"), incarnation=Incarnation(incarnation)
    )
    around = ProcessContext(
        settings=settings,
        bus=Bus(transport, CLUSTER, process, party=service.role),
        clock=clock or SystemClock(),
    )
    run = Running(service, around)
    async with asyncio.TaskGroup() as group:
        group.create_task(run.live())
        try:
            if ready:
                await until(
                    lambda: run.gone.is_set() or run.health.state is not ProcessState.STARTING
                )
            yield run
        finally:
            run.stop.set()
    await run.ended()


@asynccontextmanager
async def client_bus(
    transport: Transport, name: str = "test-client", party: Party = "client"
) -> AsyncGenerator[Bus]:
    """A bus of the test's own, in the cluster of `running`, that may play any `party`."""
    process = Process(instance=InstanceId(name), incarnation=Incarnation("1"))
    async with Bus(transport, CLUSTER, process, party=party) as bus:
        yield bus
