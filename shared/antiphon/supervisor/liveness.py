"""Which services are ready, by their heartbeats, and which ones hang, by their health ports."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from antiphon.wire.base import ProcessState
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.routes import HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from antiphon.bus.bus import Bus, Delivery
    from antiphon.config.settings import HealthConfig
    from antiphon.supervisor.child import Child
    from antiphon.wire.heartbeat import Heartbeat
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""Interval of the probes of each process, and their timeout."""

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  # compared only


class Readiness:
    def __init__(
        self, instances: Iterable[InstanceId], on_ready: Callable[[Heartbeat], None]
    ) -> None:
        self.waiting = set(instances)
        self.all_ready = asyncio.Event()
        self._on_ready = on_ready
        self.heartbeats: dict[InstanceId, Heartbeat] = {}

    async def listen(self, bus: Bus) -> None:
        await bus.listen(HEARTBEAT, self._deliver)

    def health_port(self, instance: InstanceId) -> int | None:
        heartbeat = self.heartbeats.get(instance)
        return None if heartbeat is None else heartbeat.health_port

    def _deliver(self, delivery: Delivery) -> None:
        try:
            heartbeat = delivery.read(HEARTBEAT)
        except InvalidRequest:
            return  # of another version, and so not of our processes
        instance = heartbeat.process.instance
        self.heartbeats[instance] = heartbeat
        if heartbeat.state is ProcessState.READY and instance in self.waiting:
            self.waiting.remove(instance)
            self._on_ready(heartbeat)
        if not self.waiting:
            self.all_ready.set()


class HangDetector:
    """Probes the health port of each child, and kills children that do not respond.

    A refused connection is not a hang: the process is starting or has ended, which
    `Child.keep_running` handles. Failed probes are counted instead of measuring time: the
    supervisor itself may have been frozen.

    `port_of` is the health port in a process's last heartbeat, None before the first one.
    """

    def __init__(
        self,
        children: Sequence[Child],
        port_of: Callable[[InstanceId], int | None],
        health: HealthConfig,
        timeout_s: float,
        probe_s: float = PROBE_S,
    ) -> None:
        self._children = children
        self._port_of = port_of
        self._host = _ANY_HOST.get(health.host, health.host)
        self._misses_max = max(1, math.ceil(timeout_s / probe_s))
        self._probe_s = probe_s

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(self._watch(child))

    async def _watch(self, child: Child) -> None:
        misses, process = 0, child.process
        while True:
            if child.process is not process:
                misses, process = 0, child.process
            if not child.alive or await self._responds(child):
                misses = 0
                await asyncio.sleep(self._probe_s)
                continue
            misses += 1
            fields = {"instance": child.instance, "silent_s": misses * self._probe_s}
            if misses == 1:
                log.warning("service does not answer", extra=fields)
            if misses >= self._misses_max and child.process is process:
                log.error("service hangs and is killed", extra=fields)
                child.kill()
                await child.died()

    async def _responds(self, child: Child) -> bool:
        """Whether a process responds, or there is none to respond."""
        if (port := self._port_of(child.instance)) is None:
            return True
        try:
            async with asyncio.timeout(self._probe_s):
                reader, writer = await asyncio.open_connection(self._host, port)
                try:
                    writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
                    await reader.read(1)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            return False
        except OSError:
            return True
        return True
