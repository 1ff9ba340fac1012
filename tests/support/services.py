"""Runs a service in this process, on a bus that the test chooses."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from tests.support.wait import until

from antiphon.bus.bus import Bus
from antiphon.config.settings import HealthConfig, ServiceConfig, Settings
from antiphon.service.clock import Clock, SystemClock
from antiphon.service.run import serve
from antiphon.service.service import ProcessContext, Runtime, Service, ServiceFactory
from antiphon.wire.base import Process, ProcessState, Role
from antiphon.wire.ids import ClusterName, Incarnation, InstanceId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.bus.transport import Transport
    from antiphon.service.web import ProcessHealth
    from antiphon.telemetry.metrics import Metrics
    from antiphon.wire.base import Message
    from antiphon.wire.routes import Party, Route

M = TypeVar("M", bound="Message")
S_co = TypeVar("S_co", bound=Service, covariant=True)

CLUSTER = ClusterName("test")
QUICK = Settings(
    service=ServiceConfig(heartbeat_s=0.05, drain_timeout_s=5.0),
    health=HealthConfig(host="127.0.0.1", port=0),
)
"""Settings for tests: the defaults, with short heartbeats."""


def process(name: str, life: str = "1") -> Process:
    return Process(instance=InstanceId(name), incarnation=Incarnation(life))


class Running(Generic[S_co]):
    """A service under test. Leaving `running` stops it, if the test has not."""

    def __init__(self, factory: ServiceFactory[S_co], around: ProcessContext) -> None:
        self.around = around
        self.stop = asyncio.Event()
        self.gone = asyncio.Event()
        self._factory = factory
        self._service: S_co | None = None
        self._failure: Exception | None = None

    @property
    def service(self) -> S_co:
        assert self._service is not None
        return self._service

    @property
    def role(self) -> Role:
        return self._factory.role

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[S_co]:
        async with self._factory.lifespan(runtime) as self._service:
            yield self._service

    @property
    def health(self) -> ProcessHealth:
        return self.around.health

    @property
    def metrics(self) -> Metrics:
        return self.around.metrics

    @property
    def process(self) -> Process:
        return self.around.bus.process

    async def live(self) -> None:
        try:
            await serve(self, self.around, self.stop)
        except Exception as error:  # noqa: BLE001  # as main does
            self._failure = error
        finally:
            self.gone.set()

    async def ended(self, timeout_s: float = 10.0) -> None:
        """Stop it and wait until it has ended. Raises its failure, once."""
        self.stop.set()
        async with asyncio.timeout(timeout_s):
            await self.gone.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


@asynccontextmanager
async def running(
    factory: ServiceFactory[S_co],
    transport: Transport,
    *,
    settings: Settings = QUICK,
    instance: str = "",
    incarnation: str = "1",
    clock: Clock | None = None,
    ready: bool = True,
) -> AsyncGenerator[Running[S_co]]:
    """Run a service until the block ends; its failure is raised then, unless `ended` has raised it.

    Args:
        factory: The service's class, or a test double.
        transport: Its own link to the broker, not entered yet.
        settings: `QUICK` by default.
        instance: `<role>-0` by default.
        incarnation: Must differ for a service that is restarted.
        clock: The system clock by default.
        ready: Whether the block begins when the service is ready, or at once.
    """
    here = process(instance or f"{factory.role}-0", incarnation)
    around = ProcessContext(
        settings=settings,
        bus=Bus(transport, CLUSTER, here, party=factory.role),
        clock=clock or SystemClock(),
    )
    run = Running(factory, around)
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
async def listening(bus: Bus, route: Route[M], **address: str) -> AsyncGenerator[asyncio.Queue[M]]:
    """The messages of a route that arrive during the block."""
    received: asyncio.Queue[M] = asyncio.Queue()
    subscription = await bus.listen(
        route, lambda delivery: received.put_nowait(delivery.read(route)), **address
    )
    yield received
    await subscription.drain()


@asynccontextmanager
async def client_bus(
    transport: Transport,
    name: str = "test-client",
    party: Party = "client",
    *,
    cluster: ClusterName = CLUSTER,
) -> AsyncGenerator[Bus]:
    """A separate bus for the test, in the cluster of `running`, in the role of any `party`."""
    async with Bus(transport, cluster, process(name), party=party) as bus:
        yield bus
