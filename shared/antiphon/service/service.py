"""The interface between the run loop and a service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from antiphon.service.clock import Clock, SystemClock
from antiphon.service.web import ProcessHealth
from antiphon.telemetry.metrics import Metrics

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from antiphon.bus.bus import Bus
    from antiphon.bus.transport import Subscription
    from antiphon.config.settings import Settings
    from antiphon.service.endpoint import Endpoint, Listeners
    from antiphon.service.peers import PeerTable
    from antiphon.wire.base import Process, Role, Term
    from antiphon.wire.heartbeat import RunningList, StreamSeq, WorkerLoad
    from antiphon.wire.ids import ModelName


@dataclass(frozen=True, kw_only=True)
class ProcessContext:
    """Environment of a service process. The bus is not entered yet."""

    settings: Settings
    bus: Bus
    clock: Clock = field(default_factory=SystemClock)
    # State of this process; `health.changed()` sends a heartbeat at once.
    health: ProcessHealth = field(default_factory=ProcessHealth)
    # Metrics of this process; a service adds its own to `metrics.registry`.
    metrics: Metrics = field(default_factory=Metrics)
    # Called after startup, before any work is accepted.
    on_started: Callable[[], None] = field(default=lambda: None)

    @property
    def process(self) -> Process:
        return self.bus.process


@dataclass(frozen=True, kw_only=True)
class Runtime(ProcessContext):
    """Environment of a service, created by the run loop: its bus is entered before `lifespan`."""

    # For background tasks. They are cancelled after the drain, before the lifespan ends.
    group: asyncio.TaskGroup
    peers: PeerTable
    listeners: Listeners  # open endpoints; use `listen` to add one
    metrics_port: int = 0  # where this process serves its health, too

    async def listen(self, endpoint: Endpoint) -> Subscription:
        """Open an endpoint at run time, as a scheduler does when it becomes leader.

        It is drained with the others when the process drains, or earlier by the caller. Raises
        `Unavailable` in a draining process, or if the link is down.
        """
        return await self.listeners.open(endpoint)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A service's part of its heartbeat. `changes` of a worker's list are published before it."""

    load: int
    worker: WorkerLoad | None = None
    changes: tuple[RunningList, ...] = ()
    leads: Term | None = None
    streams: tuple[StreamSeq, ...] = ()
    reads: tuple[str, ...] = ()
    tower: str = ""


class Service(Protocol):
    """A started service, as the lifespan of its factory yields it.

    The run loop guarantees: the lifespan is entered once, when the bus is up; then the endpoints
    are opened, then the process is ready. On stop: no more calls are accepted, running ones are
    awaited, then `drain`, all under one deadline; feeds and calls marked `while_draining` stay open
    until then. Then background tasks are cancelled and the lifespan is left, also after a failure.
    """

    def endpoints(self) -> Sequence[Endpoint]: ...

    def model(self) -> ModelName | None:
        """Return the served model for the heartbeat; None for services without one."""
        ...

    def report(self) -> Report:
        """Return its part of the heartbeat; called each half second, must be fast."""
        ...

    async def drain(self) -> None:
        """Return when all accepted work has ended. The run loop bounds it by the drain deadline."""
        ...


S_co = TypeVar("S_co", bound=Service, covariant=True)


class ServiceFactory(Protocol[S_co]):
    """What starts a service: its class, whose `lifespan` is a static method."""

    @property
    def role(self) -> Role: ...

    def lifespan(self, runtime: Runtime) -> AbstractAsyncContextManager[S_co]:
        """Start the service, and hold its resources: files, threads, servers."""
        ...
