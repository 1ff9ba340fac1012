"""Clocks, passed in as values: the system clock here, a manual one in simulations."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock for durations, and a wall clock for deadlines that cross the bus."""

    def now(self) -> float:
        """Monotonic time in seconds; for durations."""
        ...

    def unix_ms(self) -> int:
        """Wall clock in milliseconds since 1970; for `deadline_unix_ms`."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Monotonic time in seconds."""
        return time.monotonic()

    def unix_ms(self) -> int:
        """Wall clock in milliseconds since 1970."""
        return time.time_ns() // 1_000_000
