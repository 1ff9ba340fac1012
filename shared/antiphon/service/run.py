"""The life of a process around its service: start, ready, drain, stop, with an answer for all."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from antiphon.bus.discovery import Discovery
from antiphon.config.digest import digest
from antiphon.service.clock import Clock, SystemClock
from antiphon.service.health import Health
from antiphon.service.heartbeat import Pulse
from antiphon.service.inbox import InboxLimits
from antiphon.service.listeners import Listeners
from antiphon.service.metrics_feed import MetricsFeed
from antiphon.service.name import Name
from antiphon.service.peers import Patience, Peers
from antiphon.service.probes import probe_server
from antiphon.service.service import Runtime, Service
from antiphon.service.tasks import Tasks
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.base import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.bus.bus import Bus
    from antiphon.config.settings import Settings

log = logging.getLogger(__name__)

_CANCEL_S = 2.0
_LEAVE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a process brings to its service. The bus is not entered yet.

    Attributes:
        on_started: Called when the start is done, and before any work is taken.
    """

    settings: Settings
    bus: Bus
    clock: Clock = field(default_factory=SystemClock)
    health: Health = field(default_factory=Health)
    metrics: Metrics = field(default_factory=Metrics)
    on_started: Callable[[], None] = field(default=lambda: None)


class StoppedEarly(Exception):
    """`stop` came before the process was ready."""


async def serve(service: Service, around: Surroundings, stop: asyncio.Event) -> None:
    """Serve until `stop`, then drain.

    Returns with every accepted call answered: done, or `Unavailable` if the deadline passed. The
    same holds when it raises: when a background task fails, or the lifespan, or cannot be left.

    Raises:
        ExceptionGroup: Of `CannotStart` and `EngineError` while starting, of `Replaced` when
            another process has its name, of anything later.
    """
    settings, health = around.settings, around.health
    probes = probe_server(
        health, around.metrics, host=settings.health.host, port=settings.health.port
    )
    try:
        async with asyncio.TaskGroup() as watch:
            watch.create_task(_leave_if_starting(health, stop))
            async with probes as health_port, around.bus:
                await _live(service, around, stop, health_port)
    except* StoppedEarly:
        log.info("stopped while starting")


async def _leave_if_starting(health: Health, stop: asyncio.Event) -> None:
    """End the start, however long it would take, by failing beside it."""
    await stop.wait()
    if health.state is State.STARTING:
        raise StoppedEarly


async def _live(
    service: Service, around: Surroundings, stop: asyncio.Event, health_port: int
) -> None:
    limits = InboxLimits(
        slots=around.settings.service.slots, backlog=around.settings.service.backlog
    )
    async with Tasks() as group, Listeners(around.bus, limits, around.metrics) as listeners:
        runtime = Runtime(
            settings=around.settings,
            process=around.bus.process,
            bus=around.bus,
            group=group,
            clock=around.clock,
            peers=_peers(around),
            health=around.health,
            metrics=around.metrics,
            listeners=listeners,
            metrics_port=health_port,
        )
        await _discovery(service, runtime).listen()
        name = Name(runtime)
        await name.claim()
        pulse = Pulse(service, runtime, name, health_port)
        await pulse.listen()
        group.create_task(name.keep(), name="name")
        group.create_task(pulse.beat(), name="heartbeat")
        group.create_task(pulse.judge(), name="peers")
        feed = MetricsFeed(service, runtime)
        group.create_task(feed.publish(), name="metrics")
        async with asyncio.timeout(None) as leaving, service.lifespan(runtime):
            try:
                around.on_started()
                await _work(service, runtime, pulse, stop)
            finally:
                await listeners.end()
                await group.cancel(_CANCEL_S)
                # A lifespan that does not end must not keep a process that serves nobody.
                leaving.reschedule(asyncio.get_running_loop().time() + _LEAVE_S)


async def _work(service: Service, runtime: Runtime, pulse: Pulse, stop: asyncio.Event) -> None:
    for endpoint in service.endpoints():
        await runtime.listen(endpoint)
    runtime.health.ready()
    log.info("ready")
    await stop.wait()
    runtime.health.draining()
    timeout_s = runtime.settings.service.drain_timeout_s
    log.info("draining", extra={"drain_timeout_s": timeout_s})
    try:
        async with asyncio.timeout(timeout_s):
            await pulse.send()  # so that peers know before we are deaf, however short the drain is
            await runtime.listeners.drain_work()
            await service.drain()
            await runtime.listeners.drain()
    except TimeoutError:
        log.warning("drain timed out", extra={"drain_timeout_s": timeout_s})


def _discovery(service: Service, runtime: Runtime) -> Discovery:
    return Discovery(
        runtime.bus.transport,
        role=service.role,
        process=runtime.process,
        version=metadata.version("antiphon"),
        description=f"Antiphon {service.role}",
        endpoints=runtime.listeners.tallies,
        metadata={"cluster": runtime.settings.cluster.name},
    )


def _peers(around: Surroundings) -> Peers:
    settings = around.settings
    patience = Patience(
        heartbeat_s=settings.service.heartbeat_s,
        suspect_beats=settings.scheduler.suspect_beats,
        dead_beats=settings.scheduler.dead_beats,
        owner_s=settings.scheduler.owner_silence_s,
    )
    return Peers(around.bus.process, digest(settings.cluster), around.clock, patience)
