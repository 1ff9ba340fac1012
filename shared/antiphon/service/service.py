"""What the run loop asks of a service, and what it gives to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from antiphon.bus.bus import Bus
    from antiphon.bus.transport import Subscription
    from antiphon.config.settings import Settings
    from antiphon.service.clock import Clock
    from antiphon.service.endpoint import Endpoint
    from antiphon.service.health import ProcessHealth
    from antiphon.service.listeners import Listeners
    from antiphon.service.peers import PeerTable
    from antiphon.telemetry.metrics import Metrics
    from antiphon.wire.base import Process, Role, Term
    from antiphon.wire.heartbeat import StreamSeq, WorkerLoad
    from antiphon.wire.ids import ModelName


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One process's surroundings, made by `antiphon.service.main` and handed to its service.

    Attributes:
        process: Who we are: instance and incarnation.
        bus: Entered before `Service.lifespan`, left after it.
        group: For background tasks. They are cancelled after the drain, before the lifespan ends.
        peers: Everybody whose heartbeats we hear.
        health: State of this process; `health.changed()` sends a heartbeat at once.
        metrics: What this process counts; a service adds its own to `metrics.registry`.
        listeners: What the process listens to; use `listen`.
        metrics_port: Where this process answers `/metrics`.
    """

    settings: Settings
    process: Process
    bus: Bus
    group: asyncio.TaskGroup
    clock: Clock
    peers: PeerTable
    health: ProcessHealth
    metrics: Metrics
    listeners: Listeners
    metrics_port: int = 0

    async def listen(self, endpoint: Endpoint) -> Subscription:
        """Open an endpoint at run time, as a scheduler does that becomes leader.

        Drained with the others when the process drains, or before by whoever opened it.

        Raises:
            Unavailable: The process is draining, or the link is down.
        """
        return await self.listeners.open(endpoint)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A service's part of its heartbeat."""

    load: int
    worker: WorkerLoad | None = None
    leads: Term | None = None
    streams: tuple[StreamSeq, ...] = ()
    reads: tuple[str, ...] = ()


class Service(Protocol):
    """One of the seven. Built before the bus is up; does nothing before `lifespan` is entered.

    The loop's promises: `lifespan` is entered once, then endpoints are listened to, then the
    process is ready. On stop: no more calls are taken, running ones are awaited, `drain` is
    awaited, all under one deadline; feeds and calls marked `while_draining` come until then.
    Then background tasks are cancelled and the lifespan is left, which it is also after a failure.
    """

    role: Role

    def lifespan(self, runtime: Runtime) -> AbstractAsyncContextManager[None]:
        """Hold what the service needs while it runs: files, threads, servers."""
        ...

    def endpoints(self) -> Sequence[Endpoint]:
        """What it answers and follows; asked for once, inside the lifespan."""
        ...

    def model(self) -> ModelName | None:
        """The served model that the heartbeat names; None for services without one."""
        ...

    def report(self) -> Report:
        """What its heartbeat says; called each half second, must be quick."""
        ...

    async def drain(self) -> None:
        """Return when what was accepted has ended. The loop bounds it by the drain deadline."""
        ...
