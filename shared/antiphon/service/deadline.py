"""Deadlines that cross the bus, against a clock. A deadline is passed on; a timeout is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from antiphon.wire.errors import DeadlineExceeded

if TYPE_CHECKING:
    from antiphon.service.clock import Clock


def deadline_in(seconds: float, clock: Clock) -> int:
    """The `deadline_unix_ms` of something that may take `seconds` from now."""
    return clock.unix_ms() + round(seconds * 1000)


def remaining_s(deadline_unix_ms: int, clock: Clock) -> float:
    """Time that is left; 0 once it has passed."""
    return max(0.0, (deadline_unix_ms - clock.unix_ms()) / 1000)


class HasDeadline(Protocol):
    """A call that says until when it is waited for."""

    @property
    def deadline_unix_ms(self) -> int:
        """By the caller's clock."""
        ...

    @property
    def left_ms(self) -> int | None:
        """Time that was left when it was sent; None of an earlier version."""
        ...


def time_left_s(call: HasDeadline, clock: Clock) -> float:
    """Time that is left of a call that has just come; 0 if none is.

    It counts from the receipt: the caller's clock may be seconds away from ours.
    """
    if call.left_ms is None:
        return remaining_s(call.deadline_unix_ms, clock)
    return max(0.0, call.left_ms / 1000)


def check(call: HasDeadline, clock: Clock) -> float:
    """Time that is left of a call that has just come, and it is more than nothing.

    Raises:
        DeadlineExceeded: None is left.
    """
    left_s = time_left_s(call, clock)
    if left_s <= 0:
        raise DeadlineExceeded("the deadline has passed")
    return left_s
