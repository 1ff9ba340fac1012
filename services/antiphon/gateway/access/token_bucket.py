"""Token buckets with charges that are corrected later.

The cost of a request is known at its end; an estimate is charged at its start. Returning the
difference to a plain bucket would allow more than the rate, since a bucket that has refilled
meanwhile would be filled twice. So a bucket keeps its history since the oldest estimated charge,
and a correction acts as if it had been right from the start. In any period, the total charged is at
most the burst plus the rate times the period.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class BucketCharge:
    """One step in the history of a bucket: the inflow before it, and the charge.

    A level becomes `min(level + gained, top) - cost`. Two consecutive steps are one step of the
    same form, which keeps histories short.

    Attributes:
        gained: Inflow since the step before.
        top: Capacity before the charge.
        cost: The charge.
        estimated: Whether the cost may still be corrected.
    """

    gained: float
    top: float
    cost: float
    estimated: bool


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """The bucket holds too little.

    It will hold enough after this many seconds if nothing else is charged.
    """

    after_s: float


class TokenBucket:
    """Initially full. `now` is any monotonic clock, in seconds."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._began = burst
        """Level before the history."""
        self._history: list[BucketCharge] = []
        self._level = burst
        """Level after the history, at `_at`."""
        self._at = now

    def level(self, now: float) -> float:
        """Available amount; negative if more was used than available."""
        return min(self._level + (now - self._at) * self.rate, self.burst)

    def take(
        self, cost: float, now: float, *, estimated: bool = False
    ) -> BucketCharge | RetryAfter:
        """Take all of it or nothing. A cost above `burst` is never available: check it first."""
        level = self.level(now)
        if level < cost:
            return RetryAfter((cost - level) / self.rate)
        charge = BucketCharge((now - self._at) * self.rate, self.burst, cost, estimated)
        self._level, self._at = level - cost, now
        self._add(charge)
        return charge

    def correct(self, charge: BucketCharge, cost: float) -> None:
        """Set the actual cost of an estimated charge, once; an excess is owed."""
        assert charge.estimated, "a charge is corrected once"
        charge.estimated, charge.cost = False, cost
        history, self._history = self._history, []
        for each in history:
            self._add(each)
        level = self._began
        for each in self._history:
            level = _after(level, each)
        self._level = level

    def _add(self, charge: BucketCharge) -> None:
        """Append to the history; final charges are merged with the final one before them."""
        if charge.estimated:
            self._history.append(charge)
        elif not self._history:
            self._began = _after(self._began, charge)
        elif self._history[-1].estimated:
            self._history.append(charge)
        else:
            self._history[-1] = _merged(self._history[-1], charge)


def _after(level: float, charge: BucketCharge) -> float:
    return min(level + charge.gained, charge.top) - charge.cost


def _merged(first: BucketCharge, second: BucketCharge) -> BucketCharge:
    """Merge two final steps."""
    between = second.gained - first.cost
    return BucketCharge(
        first.gained + between, min(first.top + between, second.top), second.cost, estimated=False
    )
