"""One tenant: its limits and its usage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from antiphon.gateway.access.token_bucket import BucketCharge, RetryAfter, TokenBucket

if TYPE_CHECKING:
    from antiphon.config.tenants import TenantConfig
    from antiphon.wire.ids import TenantId

_MINUTE_S = 60.0
_SOON_S = 1.0
"""Retry advice for the concurrency limit: the time of the next free slot is unknown."""


class Limit(StrEnum):
    """A limit of a tenant."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A limit is reached; retry after this many seconds."""

    limit: Limit
    most: int
    after_s: float


@dataclass(eq=False, slots=True)
class QuotaReservation:
    """One request's share of its tenant's limits, until the request ends."""

    tenant: Tenant
    bucket: TokenBucket | None = None
    """The bucket that was charged: a reload may replace the tenant's."""
    charge: BucketCharge | None = None
    ended: bool = False

    def reserve(self, tokens: int, now: float) -> LimitReached | None:
        """Charge the maximum cost of the request. Called once."""
        assert self.charge is None, "a request reserves once"
        bucket = self.tenant.tokens
        if bucket is None:
            return None
        taken = bucket.take(tokens, now, estimated=True)
        if isinstance(taken, RetryAfter):
            return self.tenant.limit_reached(Limit.TOKENS, taken.after_s)
        self.bucket, self.charge = bucket, taken
        return None

    def end(self, tokens: int) -> None:
        """Free its slot, and correct the charge to the actual cost. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self.tenant.open_count -= 1
        if self.bucket is not None and self.charge is not None:
            self.bucket.correct(self.charge, tokens)


class Tenant:
    """Usage of a tenant. Lives as long as the gateway, or until it is removed from the keys file.

    Attributes:
        tokens: Token bucket; None without a limit.
        open_count: Number of running requests.
    """

    def __init__(self, name: TenantId, config: TenantConfig, now: float) -> None:
        self.name = name
        self.config = config
        self.open_count = 0
        self._requests = _bucket(config.requests_per_minute, config.requests_burst, now)
        self.tokens = _bucket(config.tokens_per_minute, config.tokens_burst, now)

    def reload(self, config: TenantConfig, now: float) -> None:
        """Apply new limits. Usage is kept as far as it fits into them."""
        old, self.config = self.config, config
        if (old.requests_per_minute, old.requests_burst) != (
            config.requests_per_minute,
            config.requests_burst,
        ):
            fresh = _bucket(config.requests_per_minute, config.requests_burst, now)
            self._requests = _carry_over(self._requests, fresh, now)
        if (old.tokens_per_minute, old.tokens_burst) != (
            config.tokens_per_minute,
            config.tokens_burst,
        ):
            fresh = _bucket(config.tokens_per_minute, config.tokens_burst, now)
            self.tokens = _carry_over(self.tokens, fresh, now)

    def serves(self, model: str) -> bool:
        """Whether it may use a model."""
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

    def count_request(self, now: float) -> LimitReached | None:
        """Count one call."""
        if self._requests is None:
            return None
        taken = self._requests.take(1, now)
        return (
            self.limit_reached(Limit.REQUESTS, taken.after_s)
            if isinstance(taken, RetryAfter)
            else None
        )

    def admit(self) -> QuotaReservation | LimitReached:
        """Take a slot."""
        most = self.config.concurrency
        if most is not None and self.open_count >= most:
            return self.limit_reached(Limit.CONCURRENCY, _SOON_S)
        self.open_count += 1
        return QuotaReservation(self)

    def limit_reached(self, limit: Limit, after_s: float) -> LimitReached:
        """Report which limit is reached, and its value."""
        most = getattr(self.config, limit)
        assert isinstance(most, int)
        return LimitReached(limit, most, after_s)


def _bucket(per_minute: int | None, burst: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    return TokenBucket(per_minute / _MINUTE_S, float(burst or per_minute), now)


def _carry_over(old: TokenBucket | None, new: TokenBucket | None, now: float) -> TokenBucket | None:
    """Carry the usage of an old bucket, if there was one, over to a new one."""
    if old is not None and new is not None:
        spent = old.burst - old.level(now)
        if spent > 0:
            new.take(min(spent, new.burst), now)
    return new
