"""One tenant: its limits, and what of them is in use."""

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
"""When to try again for a place: nobody knows when one will be free."""


class Limit(StrEnum):
    """What a tenant can have used up."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A limit is reached; try again after so many seconds."""

    limit: Limit
    most: int
    after_s: float


@dataclass(eq=False, slots=True)
class QuotaReservation:
    """One request's part of its tenant's limits, from its beginning to its end."""

    tenant: Tenant
    bucket: TokenBucket | None = None
    """Where its tokens are charged: the bucket may be another by its end."""
    charge: BucketCharge | None = None
    ended: bool = False

    def reserve(self, tokens: int, now: float) -> LimitReached | None:
        """Charge all that the request may need. Called once."""
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
        """Free its place, and charge what it has really used. A second end changes nothing."""
        if self.ended:
            return
        self.ended = True
        self.tenant.open_count -= 1
        if self.bucket is not None and self.charge is not None:
            self.bucket.correct(self.charge, tokens)


class Tenant:
    """Counts. Lives as long as the gateway, or until its name leaves the keys file.

    Attributes:
        tokens: None where they are not limited.
        open_count: Requests that have not ended.
    """

    def __init__(self, name: TenantId, config: TenantConfig, now: float) -> None:
        self.name = name
        self.config = config
        self.open_count = 0
        self._requests = _bucket(config.requests_per_minute, config.requests_burst, now)
        self.tokens = _bucket(config.tokens_per_minute, config.tokens_burst, now)

    def reload(self, config: TenantConfig, now: float) -> None:
        """Take other limits. What was used stays used, as far as it fits into the new ones."""
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

    def priority(self, said: int | None) -> int | None:
        """What counts for a request that said so; None: that is more than it may say."""
        if said is None:
            return self.config.priority
        most = self.config.priority_max
        return said if most is None or said <= most else None

    def output_tokens_max(self, prompt_tokens: int, choices: int) -> int | None:
        """How long each answer may get if the bucket is full; None: as long as the model allows."""
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
        """Take one of its places."""
        most = self.config.concurrency
        if most is not None and self.open_count >= most:
            return self.limit_reached(Limit.CONCURRENCY, _SOON_S)
        self.open_count += 1
        return QuotaReservation(self)

    def limit_reached(self, limit: Limit, after_s: float) -> LimitReached:
        """Say which limit is reached, and how high it is."""
        most = getattr(self.config, limit)
        assert isinstance(most, int)
        return LimitReached(limit, most, after_s)


def _bucket(per_minute: int | None, burst: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    return TokenBucket(per_minute / _MINUTE_S, float(burst or per_minute), now)


def _carry_over(old: TokenBucket | None, new: TokenBucket | None, now: float) -> TokenBucket | None:
    """Take from a new bucket what is missing from the old one, if there was one."""
    if old is not None and new is not None:
        spent = old.burst - old.level(now)
        if spent > 0:
            new.take(min(spent, new.burst), now)
    return new
