"""Finds processes that live and do nothing: frozen, or with an event loop that hangs."""

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
"""How often each process is asked, and how long it may take to answer."""

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  # compared only


class HangDetector:
    """Asks each child on its health port, and ends the one that is silent for too long.

    A port that refuses is no hang: the process is starting, or has ended, which `Child.keep` sees.
    Silence counts in questions, not by the clock: the supervisor may have been frozen itself.

    Args:
        children: What to watch.
        port_of: The health port that a process announced last; None if it has announced none.
        health: Where health is answered.
        timeout_s: How long a process may be silent.
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
        """Whether a process says anything, or none is there to say it."""
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
