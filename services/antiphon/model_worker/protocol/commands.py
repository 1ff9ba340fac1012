"""Which commands of leaders are applied, and which attempts must not start again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.wire.heartbeat import RefusalReason, RefusedCommands

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.wire.base import Attempt, Term
    from antiphon.wire.command import CommandBatch
    from antiphon.wire.ids import RequestId

log = logging.getLogger(__name__)

LOG_PAUSE_MS = 1_000
"""Minimum time between two log lines about terms that were not elected."""
REFUSED_MS = 5_000
"""How long a leader is informed that its commands were refused. Then it may try again."""


class CommandFilter:
    """Refuses batches of old terms, late ones and repeats.

    `leading` is the leader's term by the heartbeats of schedulers. Commands of lower terms than
    `term` are ignored.
    """

    def __init__(self, leading: Callable[[], Term | None]) -> None:
        self.term: Term | None = None  # the highest of an applied command
        self.seq = 0  # the last batch of that term
        self.refused: RefusedCommands | None = None  # until one is applied, or for some time
        self.unelected_count = 0  # batches whose term is too high to be an elected one
        self._refused_ms = 0
        self._unelected_ms = -LOG_PAUSE_MS  # when the last one was logged
        self._leading = leading

    def accepts(self, batch: CommandBatch, now_ms: int, offset_ms: int | None) -> bool:
        """Whether to apply a batch, which is noted as applied then.

        `offset_ms` is that of our clock to the leader's; None if it is unknown.
        """
        leading = self._leading()
        self._forget_unelected(leading)
        if self.term is not None and batch.leader < self.term:
            return False
        known = max((term.number for term in (self.term, leading) if term), default=None)
        if not batch.leader.may_follow(known):
            self.unelected_count += 1
            if now_ms - self._unelected_ms >= LOG_PAUSE_MS:
                self._unelected_ms = now_ms
                _log_refused(batch.leader, "term", term=batch.leader.number)
            return False
        if batch.leader == self.term and batch.seq <= self.seq:
            return False
        if offset_ms is None or batch.not_after_unix_ms + offset_ms < now_ms:
            reason = RefusalReason.CLOCK if offset_ms is None else RefusalReason.LATE
            if self.refused is None:
                late_s = (now_ms - batch.not_after_unix_ms - (offset_ms or 0)) / 1000
                offset_s = None if offset_ms is None else offset_ms / 1000
                _log_refused(batch.leader, reason, late_s=late_s, clock_offset_s=offset_s)
            self.refused = RefusedCommands(leader=batch.leader, seq=batch.seq, reason=reason)
            self._refused_ms = now_ms
            return False
        self.refused = None
        self.term, self.seq = batch.leader, batch.seq
        return True

    def tick(self, now_ms: int) -> None:
        self._forget_unelected(self._leading())
        if now_ms >= self._refused_ms + REFUSED_MS:
            self.refused = None

    def _forget_unelected(self, leading: Term | None) -> None:
        """Forget a term that was accepted without a leader, and is too high for the leader's."""
        if self.term is None or leading is None or self.term.may_follow(leading.number):
            return
        log.warning("term forgotten", extra={"term": self.term.number, "leads": leading.number})
        self.term, self.seq = None, 0


def _log_refused(leader: Term, reason: str, **fields: float | None) -> None:
    fixed = {"leader": leader.scheduler.instance, "reason": reason}
    log.warning("commands refused", extra={**fixed, **fields})


class AttemptTombstones:
    """Attempts that must not start again while an admit of them may be in flight.

    Keeps each for `kept_ms` at least and twice that at most, so expiry needs no search.
    """

    def __init__(self, kept_ms: int) -> None:
        self._kept_ms = kept_ms
        self._young: dict[RequestId, Attempt] = {}
        self._old: dict[RequestId, Attempt] = {}
        self._aged_at_ms = 0

    def add(self, request_id: RequestId, attempt: Attempt) -> None:
        self._young[request_id] = max(attempt, self._young.get(request_id, attempt))

    def covers(self, request_id: RequestId, attempt: Attempt) -> bool:
        attempts = (table.get(request_id) for table in (self._young, self._old))
        return any(last is not None and attempt <= last for last in attempts)

    def expire(self, now_ms: int) -> None:
        if now_ms - self._aged_at_ms >= self._kept_ms:
            self._young, self._old = {}, self._young
            self._aged_at_ms = now_ms
