"""What the broker and the services have in common: delays of restarts, and how they are stopped."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process

WINDOW_S = 60.0
FIRST_PAUSE_S = 0.5
PAUSE_S_MAX = 15.0


class Restarts:
    """No delay for the first death; a doubling delay from the second within a minute on."""

    def __init__(self) -> None:
        self._deaths: list[float] = []

    def pause_s(self, now: float) -> float:
        """Record a death at `now` and return the delay of the restart."""
        self._deaths = [at for at in self._deaths if now - at < WINDOW_S]
        self._deaths.append(now)
        repeated = len(self._deaths) - 1
        return min(FIRST_PAUSE_S * 2 ** (repeated - 1), PAUSE_S_MAX) if repeated else 0.0


async def stop_process(process: Process | None, timeout_s: float) -> bool:
    """Send SIGTERM; return whether the process had to be killed after `timeout_s`."""
    if process is None or process.returncode is not None:
        return False
    process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        return True
    return False
