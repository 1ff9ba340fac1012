"""The limits of one tenant and its usage, with token buckets whose charges are corrected later.

The cost of a request is known at its end; an estimate is charged at its start. Returning the
difference to a plain bucket would allow more than the rate, since a bucket that has refilled
meanwhile would be filled twice. So a bucket keeps its history since the oldest estimated charge,
and a correction acts as if it had been right from the start. In any period, the total charged is at
most the burst plus the rate times the period.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from antiphon.wire.errors import RateLimited

if TYPE_CHECKING:
    from antiphon.config.tenants import TenantConfig

_Limit = Literal["requests_per_minute", "tokens_per_minute", "concurrency"]

_MINUTE_S = 60.0
_SOON_S = 1.0  # retry advice for the concurrency limit: the time of the next free slot is unknown


@dataclass(eq=False, slots=True)
class QuotaReservation:
    """One request's share of its tenant's limits, until the request ends."""

    tenant: Tenant
    bucket: TokenBucket | None = None  # that was charged: a reload may replace the tenant's
    charge: BucketCharge | None = None
    ended: bool = False

    def reserve(self, tokens: int, now: float) -> None:
        """Charge the maximum cost of the request.

        Raises:
            RateLimited: The bucket holds less now.
        """
        assert self.charge is None, "a request reserves once"
        bucket = self.tenant.tokens
        if bucket is None:
            return
        taken = bucket.take(tokens, now, estimated=True)
        if isinstance(taken, RetryAfter):
            raise self.tenant.rate_limited("tokens_per_minute", taken.after_s)
        self.bucket, self.charge = bucket, taken

    def end(self, tokens: int) -> None:
        """Free its slot, and correct the charge to the actual cost. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self.tenant.open_count -= 1
        if self.bucket is not None and self.charge is not None:
            self.bucket.correct(self.charge, tokens)


class Tenant:
    """Usage of a tenant, as long as the gateway runs and the keys file has the tenant."""

    def __init__(self, config: TenantConfig, now: float) -> None:
        self.config = config
        self.open_count = 0
        self._requests = _bucket(config.requests_per_minute, config.requests_burst, now)
        self.tokens = _bucket(config.tokens_per_minute, config.tokens_burst, now)

    def reload(self, config: TenantConfig, now: float) -> None:
        """Apply new limits. Usage is kept as far as it fits into them."""
        fresh = Tenant(config, now)
        self.config = config
        self._requests = _carry_over(self._requests, fresh._requests, now)
        self.tokens = _carry_over(self.tokens, fresh.tokens, now)

    def serves(self, model: str) -> bool:
        return self.config.models is None or model in self.config.models

    def priority(self, requested: int | None) -> int | None:
        """Return the effective priority; None if the requested one is not allowed."""
        if requested is None:
            return self.config.priority
        most = self.config.priority_max
        return requested if most is None or requested <= most else None

    def output_tokens_max(self, prompt_tokens: int, choices: int) -> int | None:
        """Output token limit of each choice with a full bucket; None without a limit."""
        if self.tokens is None:
            return None
        return int(self.tokens.burst - prompt_tokens) // choices

    def count_request(self, now: float) -> None:
        """Count one call.

        Raises:
            RateLimited: There were too many.
        """
        taken = self._requests.take(1, now) if self._requests is not None else None
        if isinstance(taken, RetryAfter):
            raise self.rate_limited("requests_per_minute", taken.after_s)

    def admit(self) -> QuotaReservation:
        """Take a slot.

        Raises:
            RateLimited: All are taken.
        """
        most = self.config.concurrency
        if most is not None and self.open_count >= most:
            raise self.rate_limited("concurrency", _SOON_S)
        self.open_count += 1
        return QuotaReservation(self)

    def rate_limited(self, limit: _Limit, after_s: float) -> RateLimited:
        most = getattr(self.config, limit)
        unit = "concurrent requests" if limit == "concurrency" else limit.replace("_", " ")
        return RateLimited(
            f"the limit of this key is reached: {most} {unit}",
            retry_after_s=after_s,
            details={"limit": limit},
        )


@dataclass(slots=True, eq=False)
class BucketCharge:
    """One step in the history of a bucket: the inflow before it, and the charge.

    A level becomes `min(level + gained, top) - cost`. Two consecutive steps are one step of the
    same form, which keeps histories short.
    """

    gained: float  # since the step before
    top: float  # capacity before the charge
    cost: float
    estimated: bool  # the cost may still be corrected


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """The bucket holds too little; it holds enough then if nothing else is charged."""

    after_s: float


class TokenBucket:
    """Initially full. `now` is any monotonic clock, in seconds."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._began = burst  # level before the history
        self._history: list[BucketCharge] = []
        self._level = burst  # level after the history, at `_at`
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
    between = second.gained - first.cost
    return BucketCharge(
        first.gained + between, min(first.top + between, second.top), second.cost, estimated=False
    )


def _bucket(per_minute: int | None, burst: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    return TokenBucket(per_minute / _MINUTE_S, float(burst or per_minute), now)


def _carry_over(old: TokenBucket | None, new: TokenBucket | None, now: float) -> TokenBucket | None:
    if old is None or new is None:
        return new
    if (old.rate, old.burst) == (new.rate, new.burst):
        return old
    spent = old.burst - old.level(now)
    if spent > 0:
        new.take(min(spent, new.burst), now)
    return new
