"""Token buckets: so much at once, and so much a second; with charges that are corrected later.

What a request will cost is known when it has ended, and a guess is charged when it begins. Giving
the difference back to a plain bucket would let a tenant have more than its rate: a bucket that has
filled meanwhile would be filled twice. So a bucket remembers what happened since the oldest charge
that is still a guess, and a corrected one is as if it had been right from the beginning. In any
time, what is charged is at most the burst and the rate times that time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class BucketCharge:
    """One step in the history of a bucket: what had flowed in by then, and what was taken.

    A level becomes `min(level + gained, top) - cost`. Two such steps, one after the other, are one
    step of the same form, which keeps histories short.

    Attributes:
        gained: What has come in since the step before.
        top: What the bucket holds at most, before the cost is taken.
        cost: What is taken.
        guess: Whether the cost may still be corrected.
    """

    gained: float
    top: float
    cost: float
    estimated: bool


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """There is not enough now. There will be after so many seconds, if nobody else takes it."""

    after_s: float


class TokenBucket:
    """Full at the beginning. `now` is any clock that never goes back, in seconds."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._began = burst
        """The level before the history."""
        self._history: list[BucketCharge] = []
        self._level = burst
        """The level after it, at `_at`."""
        self._at = now

    def level(self, now: float) -> float:
        """What could be taken now; below zero if more was used than was there."""
        return min(self._level + (now - self._at) * self.rate, self.burst)

    def take(
        self, cost: float, now: float, *, estimated: bool = False
    ) -> BucketCharge | RetryAfter:
        """Take all of it or nothing. What exceeds the burst is never there: ask `burst` first."""
        level = self.level(now)
        if level < cost:
            return RetryAfter((cost - level) / self.rate)
        charge = BucketCharge((now - self._at) * self.rate, self.burst, cost, estimated)
        self._level, self._at = level - cost, now
        self._add(charge)
        return charge

    def correct(self, charge: BucketCharge, cost: float) -> None:
        """Say what a guess has really cost, once; more than was guessed is owed."""
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
        """Append to the history; what is certain is joined with what is certain before it."""
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
    """Two certain steps as one."""
    between = second.gained - first.cost
    return BucketCharge(
        first.gained + between, min(first.top + between, second.top), second.cost, estimated=False
    )
