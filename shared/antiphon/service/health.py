"""State of a process, and notification of its heartbeat on changes."""

from __future__ import annotations

import asyncio

from antiphon.wire.base import ProcessState


class ProcessHealth:
    """State of this process: starting, then ready, then draining; never back."""

    def __init__(self) -> None:
        self._state = ProcessState.STARTING
        self._changed = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def state(self) -> ProcessState:
        """State in health checks and heartbeats."""
        return self._state

    def ready(self) -> None:
        """Start to accept work."""
        assert self._state is ProcessState.STARTING
        self._move(ProcessState.READY)

    def draining(self) -> None:
        """Accept no new work; accepted work continues."""
        self._move(ProcessState.DRAINING)

    def changed(self) -> None:
        """Send a heartbeat at once, because its content changed, such as the leader."""
        self._changed.set()

    async def send_heartbeat(self) -> None:
        """Send a heartbeat at once, and return when it was sent, or sending failed."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(sent)
        self.changed()
        await sent

    def take_waiters(self) -> list[asyncio.Future[None]]:
        """Return the futures that wait for the next heartbeat. For the heartbeat task only."""
        waiters, self._waiters = self._waiters, []
        return waiters

    async def wait_changed(self) -> None:
        """Wait for the next change. For the heartbeat task only."""
        await self._changed.wait()
        self._changed.clear()

    def _move(self, state: ProcessState) -> None:
        self._state = state
        self.changed()
