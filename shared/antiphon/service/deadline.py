"""Deadlines that cross the bus, against a clock. A deadline is passed on; a timeout is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.errors import DeadlineExceeded

if TYPE_CHECKING:
    from antiphon.service.clock import Clock


def deadline_in(seconds: float, clock: Clock) -> int:
    """The `deadline_unix_ms` of something that may take `seconds` from now."""
    return clock.unix_ms() + round(seconds * 1000)


def remaining_s(deadline_unix_ms: int, clock: Clock) -> float:
    """Time that is left; 0 once it has passed."""
    return max(0.0, (deadline_unix_ms - clock.unix_ms()) / 1000)


def check(deadline_unix_ms: int, clock: Clock) -> float:
    """Time that is left, and it is more than nothing.

    Raises:
        DeadlineExceeded: None is left.
    """
    left_s = remaining_s(deadline_unix_ms, clock)
    if left_s <= 0:
        raise DeadlineExceeded("the deadline has passed")
    return left_s
