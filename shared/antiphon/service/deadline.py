"""Deadlines that cross the bus. Deadlines are passed on to other calls; timeouts are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from antiphon.wire.errors import DeadlineExceeded

if TYPE_CHECKING:
    from antiphon.service.clock import Clock


def deadline_in(seconds: float, clock: Clock) -> int:
    """Return the `deadline_unix_ms` that is `seconds` from now."""
    return clock.unix_ms() + round(seconds * 1000)


def remaining_s(deadline_unix_ms: int, clock: Clock) -> float:
    """Return the time until a deadline; 0 once it has passed."""
    return max(0.0, (deadline_unix_ms - clock.unix_ms()) / 1000)


class HasDeadline(Protocol):
    """A call with a deadline."""

    @property
    def deadline_unix_ms(self) -> int:
        """Deadline by the caller's clock."""
        ...

    @property
    def left_ms(self) -> int | None:
        """Remaining time when the call was sent; None in messages of an earlier version."""
        ...


def time_left_s(call: HasDeadline, clock: Clock) -> float:
    """Return the remaining time of a call that was just received; 0 if none is left.

    `left_ms` counts from the receipt: the caller's clock may be seconds off ours.
    """
    if call.left_ms is None:
        return remaining_s(call.deadline_unix_ms, clock)
    return max(0.0, call.left_ms / 1000)


def check(call: HasDeadline, clock: Clock) -> float:
    """Return the remaining time of a call that was just received, which is more than 0.

    Raises:
        DeadlineExceeded: No time is left.
    """
    left_s = time_left_s(call, clock)
    if left_s <= 0:
        raise DeadlineExceeded("the deadline has passed")
    return left_s
