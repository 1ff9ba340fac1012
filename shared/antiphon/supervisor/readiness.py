"""Wait until the heartbeats of all services report that they are ready."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.wire.base import ProcessState
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.routes import HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from antiphon.bus.bus import Bus, Delivery
    from antiphon.wire.heartbeat import Heartbeat
    from antiphon.wire.ids import InstanceId


class Readiness:
    """Tracks which services are ready, by their heartbeats."""

    def __init__(
        self, instances: Iterable[InstanceId], on_ready: Callable[[Heartbeat], None]
    ) -> None:
        self._waiting = set(instances)
        self._on_ready = on_ready
        self._all = asyncio.Event()
        self.heartbeats: dict[InstanceId, Heartbeat] = {}

    async def listen(self, bus: Bus) -> None:
        """Subscribe to the heartbeats of all roles."""
        await bus.listen(HEARTBEAT, self._deliver)

    async def wait(self) -> None:
        """Return once each service has been ready; the caller bounds the wait."""
        await self._all.wait()

    @property
    def waiting(self) -> frozenset[InstanceId]:
        """Services that have not been ready yet."""
        return frozenset(self._waiting)

    def health_port(self, instance: InstanceId) -> int | None:
        """Return the health port of a process, from its last heartbeat."""
        heartbeat = self.heartbeats.get(instance)
        return None if heartbeat is None else heartbeat.health_port

    def _deliver(self, delivery: Delivery) -> None:
        try:
            heartbeat = delivery.read(HEARTBEAT)
        except InvalidRequest:
            return  # of another version, and so not of our processes
        instance = heartbeat.process.instance
        self.heartbeats[instance] = heartbeat
        if heartbeat.state is ProcessState.READY and instance in self._waiting:
            self._waiting.remove(instance)
            self._on_ready(heartbeat)
        if not self._waiting:
            self._all.set()
