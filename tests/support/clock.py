"""Time that passes when a test says so."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """Implements `antiphon.service.clock.Clock`; `advance` moves it and wakes who sleeps on it."""

    def __init__(self, now: float = 0.0, unix_ms: int = 1_700_000_000_000) -> None:
        self._now = now
        self._unix_ms_at_zero = unix_ms - round(now * 1000)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        """Seconds that never go back."""
        return self._now

    def unix_ms(self) -> int:
        """Wall clock in milliseconds since 1970."""
        return self._unix_ms_at_zero + round(self._now * 1000)

    @property
    def sleepers(self) -> int:
        """How many sleep now."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Return when the clock has been moved on by `seconds`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._numbers), future))
        await future

    def advance(self, seconds: float) -> None:
        """Move on, and wake whose time has come: in the order of their times, then of their calls.

        They run when the caller awaits next, and find the clock where it was moved to.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds:g} s")
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
