"""A clock that advances only when a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """Implements `antiphon.service.clock.Clock`; `advance` moves it and wakes its sleepers."""

    def __init__(self, now: float = 0.0, unix_ms: int = 1_700_000_000_000) -> None:
        self._now = now
        self._unix_ms_at_zero = unix_ms - round(now * 1000)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self._now

    def unix_ms(self) -> int:
        return self._unix_ms_at_zero + round(self._now * 1000)

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward, or back; durations do not notice."""
        self._unix_ms_at_zero += round(seconds * 1000)

    @property
    def sleepers(self) -> int:
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has advanced by `seconds`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._numbers), future))
        await future

    def advance(self, seconds: float) -> None:
        """Advance the clock and wake due sleepers, ordered by their times, then by their calls.

        They run when the caller next awaits, and see the new time.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds:g} s")
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
