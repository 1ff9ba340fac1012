"""Clocks, passed in as values, and deadlines, which are passed on to other calls."""

from __future__ import annotations

import time
from typing import Protocol

from antiphon.wire.errors import DeadlineExceeded


class Clock(Protocol):
    """A monotonic clock for durations, and a wall clock for deadlines that cross the bus."""

    def now(self) -> float: ...

    def unix_ms(self) -> int: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000


def deadline_in(seconds: float, clock: Clock) -> int:
    return clock.unix_ms() + round(seconds * 1000)


def remaining_s(deadline_unix_ms: int, clock: Clock) -> float:
    return max(0.0, (deadline_unix_ms - clock.unix_ms()) / 1000)


class HasDeadline(Protocol):
    @property
    def deadline_unix_ms(self) -> int: ...

    @property
    def left_ms(self) -> int | None:
        """Remaining time when the call was sent; None in messages of an earlier version."""
        ...


def time_left_s(call: HasDeadline, clock: Clock) -> float:
    """Return the remaining time of a call that was just received; 0 if none is left."""
    # `left_ms` counts from the receipt: the caller's clock may be seconds off ours.
    if call.left_ms is None:
        return remaining_s(call.deadline_unix_ms, clock)
    return max(0.0, call.left_ms / 1000)


def check(call: HasDeadline, clock: Clock) -> float:
    """As `time_left_s`, but raises `DeadlineExceeded` if no time is left."""
    left_s = time_left_s(call, clock)
    if left_s <= 0:
        raise DeadlineExceeded("the deadline has passed")
    return left_s
