"""Where a process is in its life, and who is told when that changes."""

from __future__ import annotations

import asyncio

from antiphon.wire.base import ProcessState


class ProcessHealth:
    """The state of this process: starting, then ready, then draining; never back."""

    def __init__(self) -> None:
        self._state = ProcessState.STARTING
        self._changed = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def state(self) -> ProcessState:
        """What health checks and heartbeats say."""
        return self._state

    def ready(self) -> None:
        """Begin to take work."""
        assert self._state is ProcessState.STARTING
        self._move(ProcessState.READY)

    def draining(self) -> None:
        """Take no new work; what was accepted goes on."""
        self._move(ProcessState.DRAINING)

    def changed(self) -> None:
        """Send a heartbeat at once: something that it says is news, such as who leads."""
        self._changed.set()

    async def send_heartbeat(self) -> None:
        """Send a heartbeat at once, and return when it is out, or could not be sent."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(told)
        self.changed()
        await told

    def take_waiters(self) -> list[asyncio.Future[None]]:
        """Who waits for the heartbeat that is sent next. For the heartbeat only."""
        untold, self._waiters = self._waiters, []
        return untold

    async def wait_changed(self) -> None:
        """Wait for the next change. One waiter only: the heartbeat."""
        await self._changed.wait()
        self._changed.clear()

    def _move(self, state: ProcessState) -> None:
        self._state = state
        self.changed()
