"""Lifecycle of a service process: start, ready, drain, stop; every accepted call gets a reply."""

from __future__ import annotations

import asyncio
import logging
from importlib import metadata

from antiphon.bus.discovery import answer_discovery
from antiphon.config.cluster import digest
from antiphon.service.endpoint import Listeners
from antiphon.service.heartbeat import Heartbeater
from antiphon.service.inbox import InboxLimits
from antiphon.service.instance_name import InstanceName
from antiphon.service.metrics_publisher import MetricsPublisher
from antiphon.service.peers import LivenessConfig, PeerTable
from antiphon.service.service import ProcessContext, Runtime, Service, ServiceFactory
from antiphon.service.tasks import Tasks
from antiphon.service.web import ProcessHealth, probe_server
from antiphon.wire.base import ProcessState

log = logging.getLogger(__name__)

_CANCEL_S = 2.0
_LEAVE_S = 2.0


class StoppedEarly(Exception):
    pass


async def serve(
    factory: ServiceFactory[Service], context: ProcessContext, stop: asyncio.Event
) -> None:
    """Serve until `stop`, then drain.

    On return every accepted call has a reply: its result, or `Unavailable` if the deadline passed.
    This holds also when it raises: when a background task or the lifespan fails, or does not end.

    Raises:
        ExceptionGroup: Of `CannotStart` and `EngineError` during startup, of `Replaced` when
            another process has its name, of any error later.
    """
    health, at = context.health, context.settings.health
    probes = probe_server(health, context.metrics, host=at.host, port=at.port)
    try:
        async with asyncio.TaskGroup() as watch:
            watch.create_task(_abort_start_on_stop(health, stop))
            async with probes as health_port, context.bus:
                await _run(factory, context, stop, health_port)
    except* StoppedEarly:
        log.info("stopped while starting")


async def _abort_start_on_stop(health: ProcessHealth, stop: asyncio.Event) -> None:
    """Abort the startup on `stop`, by failing in the same task group."""
    await stop.wait()
    if health.state is ProcessState.STARTING:
        raise StoppedEarly


async def _run(
    factory: ServiceFactory[Service], context: ProcessContext, stop: asyncio.Event, health_port: int
) -> None:
    service_config = context.settings.service
    limits = InboxLimits(slots=service_config.slots, backlog=service_config.backlog)
    async with Tasks() as group, Listeners(context.bus, limits, context.metrics) as listeners:
        runtime = Runtime(
            **vars(context),
            group=group,
            peers=_peers(context),
            listeners=listeners,
            metrics_port=health_port,
        )
        await answer_discovery(
            context.bus.transport,
            role=factory.role,
            process=context.bus.process,
            version=metadata.version("antiphon"),
            cluster=context.settings.cluster.name,
            endpoints=listeners.counters,
        )
        name = InstanceName(runtime)
        await name.claim()
        heartbeater = Heartbeater(factory.role, runtime, name)
        await heartbeater.listen()
        group.create_task(name.watch(), name="name")
        group.create_task(heartbeater.send_periodically(), name="heartbeat")
        group.create_task(heartbeater.watch_peers(), name="peers")
        async with asyncio.timeout(None) as leaving, factory.lifespan(runtime) as service:
            try:
                heartbeater.service = service
                publisher = MetricsPublisher(factory.role, service.model(), runtime)
                context.on_started()
                await _serve_until_stop(service, runtime, heartbeater, publisher, stop)
            finally:
                await listeners.end()
                await group.cancel(_CANCEL_S)
                # A lifespan that hangs must not keep alive a process that serves no requests.
                leaving.reschedule(asyncio.get_running_loop().time() + _LEAVE_S)


async def _serve_until_stop(
    service: Service,
    runtime: Runtime,
    heartbeater: Heartbeater,
    publisher: MetricsPublisher,
    stop: asyncio.Event,
) -> None:
    for endpoint in service.endpoints():
        await runtime.listen(endpoint)
    runtime.health.ready()
    runtime.group.create_task(publisher.publish(), name="metrics")
    log.info("ready")
    await stop.wait()
    runtime.health.draining()
    timeout_s = runtime.settings.service.drain_timeout_s
    log.info("draining", extra={"drain_timeout_s": timeout_s})
    try:
        async with asyncio.timeout(timeout_s):
            # Peers must know before we unsubscribe, however short the drain is.
            await heartbeater.send()
            await runtime.listeners.drain_work()
            await service.drain()
            await runtime.listeners.drain()
    except TimeoutError:
        log.warning("drain timed out", extra={"drain_timeout_s": timeout_s})


def _peers(context: ProcessContext) -> PeerTable:
    settings = context.settings
    liveness = LivenessConfig(
        heartbeat_s=settings.service.heartbeat_s,
        suspect_beats=settings.scheduler.suspect_beats,
        dead_beats=settings.scheduler.dead_beats,
        owner_s=settings.scheduler.owner_silence_s,
    )
    return PeerTable(context.bus.process, digest(settings.cluster), context.clock, liveness)
