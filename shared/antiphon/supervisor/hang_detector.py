"""Detect processes that run but do not respond: frozen, or with a hanging event loop."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.config.process import HealthConfig
    from antiphon.supervisor.child import Child
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""Interval of the probes of each process, and their timeout."""

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  # compared only


class HangDetector:
    """Probes the health port of each child, and kills children that do not respond.

    A refused connection is not a hang: the process is starting or has ended, which
    `Child.keep_running` handles. Failed probes are counted instead of measuring time: the
    supervisor itself may have been frozen.

    Args:
        children: The processes to watch.
        port_of: The health port in a process's last heartbeat; None before the first one.
        health: Host of the health ports.
        timeout_s: How long a process may not respond.
        probe_s: See `PROBE_S`.
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
        """Watch until cancelled."""
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
        port = self._port_of(child.instance)
        if port is None:
            return True
        try:
            async with asyncio.timeout(self._probe_s):
                return await self._probe(port)
        except TimeoutError:
            return False
        except OSError:
            return True

    async def _probe(self, port: int) -> bool:
        reader, writer = await asyncio.open_connection(self._host, port)
        try:
            writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
            await reader.read(1)
        finally:
            writer.transport.abort()
        return True
