"""Time as a value that is passed in: the real clock here, a manual one in simulations."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time, twice: for durations, and for deadlines that cross the bus."""

    def now(self) -> float:
        """Seconds that never go back; for durations."""
        ...

    def unix_ms(self) -> int:
        """Wall clock in milliseconds since 1970; for `deadline_unix_ms`."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def unix_ms(self) -> int:
        """Wall clock in milliseconds since 1970."""
        return time.time_ns() // 1_000_000
