"""Where a process is in its life, and who is told when that changes."""

from __future__ import annotations

import asyncio

from antiphon.wire.base import State


class Health:
    """The state of this process: starting, then ready, then draining; never back."""

    def __init__(self) -> None:
        self._state = State.STARTING
        self._changed = asyncio.Event()
        self._untold: list[asyncio.Future[None]] = []

    @property
    def state(self) -> State:
        """What health checks and heartbeats say."""
        return self._state

    def ready(self) -> None:
        """Begin to take work."""
        assert self._state is State.STARTING
        self._move(State.READY)

    def draining(self) -> None:
        """Take no new work; what was accepted goes on."""
        self._move(State.DRAINING)

    def changed(self) -> None:
        """Send a heartbeat at once: something that it says is news, such as who leads."""
        self._changed.set()

    async def tell(self) -> None:
        """Send a heartbeat at once, and return when it is out, or could not be sent."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._untold.append(told)
        self.changed()
        await told

    def take_untold(self) -> list[asyncio.Future[None]]:
        """Who waits for the heartbeat that is sent next. For the heartbeat only."""
        untold, self._untold = self._untold, []
        return untold

    async def change(self) -> None:
        """Wait for the next change. One waiter only: the heartbeat."""
        await self._changed.wait()
        self._changed.clear()

    def _move(self, state: State) -> None:
        self._state = state
        self.changed()
