"""Heartbeats: send this process's, and feed those of peers to the peer table."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from antiphon.bus.transport import NoResponders
from antiphon.config.cluster import digest
from antiphon.service.clock import deadline_in
from antiphon.service.endpoint import StreamEndpoint
from antiphon.service.peers import Peer, PeerChange
from antiphon.service.service import Report, Runtime, Service
from antiphon.service.tasks import isolated
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.errors import EngineError, RequestTooLarge
from antiphon.wire.heartbeat import ClaimName, Discover, Heartbeat, ProcessExited
from antiphon.wire.routes import DISCOVER, EXIT, HEARTBEAT, HEARTBEAT_SOURCES, NAME, RUNNING

if TYPE_CHECKING:
    from antiphon.service.instance_name import InstanceName

log = logging.getLogger(__name__)

_REPLY_JITTER_S = 0.1


class Heartbeater:
    def __init__(self, role: Role, runtime: Runtime, name: InstanceName) -> None:
        self.service: Service | None = None  # reports its part once it has started
        self._role = role
        self._runtime = runtime
        self._name = name
        self._config_digest = digest(runtime.settings.cluster)
        self._reply_pending = False

    async def listen(self) -> None:
        """Subscribe to the heartbeats that the route table lists for this role, and to discover."""
        refused = self._runtime.metrics.peers_refused
        self._runtime.peers.on_reject(lambda reason: refused.labels(reason).inc())
        role, instance = self._role, self._runtime.process.instance
        addresses = [{"role": str(other)} for other in HEARTBEAT_SOURCES.get(role, ())]
        if role not in HEARTBEAT_SOURCES.get(role, ()):
            # Also to our own: their echo proves that the link works, and heartbeats of another
            # process with our name show that we have lost the name.
            addresses.append({"role": str(role), "instance": instance})
        for address in addresses:
            await self._runtime.listen(
                StreamEndpoint(route=HEARTBEAT, apply=self._on_heartbeat, address=address)
            )
        await self._runtime.listen(StreamEndpoint(route=DISCOVER, apply=self._on_discover))
        await self._runtime.listen(StreamEndpoint(route=EXIT, apply=self._on_exit))
        self._runtime.bus.link.on_connect(self._on_connected)
        await self._on_connected()

    async def send_periodically(self) -> None:
        """Send a heartbeat each `heartbeat_s` and at each change, until cancelled."""
        pause_s = self._runtime.settings.service.heartbeat_s
        while True:
            waiters = self._runtime.health.take_waiters()
            await self.send()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            try:
                async with asyncio.timeout(pause_s):
                    await self._runtime.health.wait_changed()
            except TimeoutError:
                continue

    async def watch_peers(self) -> None:
        if self._role not in HEARTBEAT_SOURCES:
            return
        peers, link = self._runtime.peers, self._runtime.bus.link
        peers.watch(self._remove_peer_age)
        self._runtime.metrics.before_collect(self._export_peer_ages)
        while True:
            due_s = peers.update_liveness(link_up=link.up, connect_count=link.connect_count)
            for peer in peers.take_late():
                self._runtime.group.create_task(isolated(self._probe, peer), name="probe")
            await asyncio.sleep(due_s)

    async def send(self) -> None:
        """Send one heartbeat. While the link is down it is dropped; the next one replaces it."""
        instance, role = self._runtime.process.instance, self._role
        bus, report = self._runtime.bus, self._report()
        try:
            beat = self._heartbeat(report)
            for changes in report.changes:
                assert beat.model is not None, "a worker serves a model"
                bus.publish(RUNNING, changes, model=beat.model, worker=instance)
            bus.publish(HEARTBEAT, beat, role=role, instance=instance)
        except RequestTooLarge as error:
            # Later ones will be too large as well: peers will consider us dead.
            self._runtime.metrics.bus_errors.labels("heartbeat").inc()
            log.error("heartbeat not sent", extra={"code": error.code, "reason": error.message})  # noqa: TRY400  # no bug of this line
        except EngineError as error:
            self._runtime.metrics.bus_errors.labels("heartbeat").inc()
            log.debug("heartbeat not sent", extra={"code": error.code})

    @property
    def _started(self) -> Service | None:
        starting = self._runtime.health.state is ProcessState.STARTING
        return None if starting else self.service

    def _report(self) -> Report:
        return Report(load=0) if self._started is None else self._started.report()

    def _heartbeat(self, report: Report) -> Heartbeat:
        runtime, service = self._runtime, self._started
        dead_s = runtime.settings.service.heartbeat_s * runtime.settings.scheduler.dead_beats
        return Heartbeat(
            role=self._role,
            process=runtime.process,
            state=runtime.health.state,
            model=None if service is None else service.model(),
            config_digest=self._config_digest,
            health_port=runtime.metrics_port,
            load=report.load,
            worker=report.worker,
            leads=report.leads,
            streams=report.streams,
            reads=report.reads,
            sent_unix_ms=runtime.clock.unix_ms(),
            not_after_unix_ms=deadline_in(dead_s, runtime.clock),
            unechoed_ms=runtime.peers.count_sent(runtime.bus.link.connect_count),
            tower=report.tower,
        )

    async def _probe(self, late: Peer) -> None:
        """Call the name of a peer that is late: without its connection, no process responds."""
        claim = ClaimName(process=self._runtime.process)
        beat_s, instance = self._runtime.settings.service.heartbeat_s, late.process.instance
        holder = None
        try:
            reply = await self._runtime.bus.call(NAME, claim, timeout_s=beat_s, instance=instance)
            holder = reply.process
        except NoResponders:
            log.info("no process responds to a name", extra={"peer": instance})
        except EngineError:
            return  # it may be frozen or overloaded
        self._runtime.peers.on_probed(late, holder)

    async def _on_connected(self) -> None:
        """Discover peers: at the start and after each reconnect."""
        self._runtime.health.changed()
        try:
            self._runtime.bus.publish(DISCOVER, Discover(asker=self._runtime.process))
        except EngineError:
            self._runtime.metrics.bus_errors.labels("discover").inc()

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        self._runtime.peers.on_heartbeat(beat)
        if self._runtime.peers.take_name_conflict() is not None:
            self._name.recheck()

    def _on_exit(self, message: ProcessExited) -> None:
        self._runtime.peers.on_exit(message.process)

    def _on_discover(self, question: Discover) -> None:
        """Reply after a random delay: the whole cluster receives it at once."""
        if question.asker == self._runtime.process:
            return
        if not self._reply_pending:
            self._reply_pending = True
            pause_s = random.uniform(0, _REPLY_JITTER_S)  # noqa: S311  # spreads load
            asyncio.get_running_loop().call_later(pause_s, self._reply_to_discover)

    def _reply_to_discover(self) -> None:
        self._reply_pending = False
        self._runtime.health.changed()

    def _export_peer_ages(self) -> None:
        peers, age = self._runtime.peers, self._runtime.metrics.peer_age
        for peer in peers.all():
            age.labels(peer.heartbeat.role, peer.process.instance).set(peers.age_s(peer))

    def _remove_peer_age(self, change: PeerChange, peer: Peer) -> None:
        if change is PeerChange.DIED:
            self._runtime.metrics.peer_age.remove(peer.heartbeat.role, peer.process.instance)
