"""Leader election for one model's queue. No lock: the highest term leads; a timeout starts one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from antiphon.scheduler.leader_config import (
    ELECTION_TIMEOUT_BEATS,
    RESTART_PAUSE_BEATS,
    RESTART_PAUSE_MAX_S,
    SOUND_TERM_S,
    LeaderConfig,
)
from antiphon.wire.base import TERM_JUMP_MAX, TERM_MAX, Process, Term, leading_term

if TYPE_CHECKING:
    from collections.abc import Sequence


class LeaderElection:
    """One scheduler's view of the terms.

    The leader follows from the current claims of live schedulers, see `leading_term`. The numbers
    of earlier terms serve only to make the next one higher, since attempts are ordered by them. So
    a forged number does no more harm than to be skipped in that count.

    Attributes:
        term: The local term while this process leads.
        failures: Consecutive failed terms.
    """

    def __init__(self, process: Process, rules: LeaderConfig, now: float) -> None:
        self.term: Term | None = None
        self._process = process
        self._quiet_s = rules.beats(ELECTION_TIMEOUT_BEATS)
        self._leader: Term | None = None  # another scheduler's, while it is claimed
        self._number_max: int | None = None
        self._quiet_since = now
        self._leaving = False
        self.failures = 0
        self._failed_until = now
        self._claimed_at = now
        self._chance = random.Random(f"{process.instance} {process.incarnation}")  # noqa: S311  # no secret
        self._restart_s = rules.beats(RESTART_PAUSE_BEATS)

    @property
    def highest(self) -> Term | None:
        """The leading term as far as is known: the local one, or another scheduler's."""
        return self.term or self._leader

    def observe_term(self, term: Term) -> bool:
        """Record a term whose commands a worker has applied. A higher one ends the local term.

        Returns False if it is too high to be an elected one; it then changes nothing.
        """
        if not self._count(term):
            return False
        if self.term is not None and term > self.term:
            self.term = None
        return True

    def observe_claims(self, claims: Sequence[Term]) -> bool:
        """Apply the current claims of the other live schedulers.

        Returns False if a claim is too high to be an elected one; that claim changes nothing.
        """
        credible = [term for term in sorted(claims) if self._count(term)]
        before, self._leader = self._leader, leading_term(credible)
        if before is not None and self._leader is None:
            # It no longer leads: the next claim may come at once.
            self._quiet_since = -self._quiet_s
        if self.term is not None and leading_term([self.term, *credible]) != self.term:
            self.term = None
        return len(credible) == len(claims)

    def reset_timeout(self, now: float) -> None:
        """Restart the election timeout: without a link, missed heartbeats mean nothing."""
        self._quiet_since = now

    def claim(self, now: float) -> bool:
        """Take the next term if no scheduler leads. Returns whether it did."""
        if self._leaving or self.term is not None or self._leader is not None:
            return False
        if now - self._quiet_since < self._quiet_s or now < self._failed_until:
            return False
        known = self._number_max or 0
        # A worker that knows a term near the maximum forgets it: it is too far ahead of the claim.
        self._number_max = 1 if known >= TERM_MAX else known + 1
        self.term = Term(number=self._number_max, scheduler=self._process)
        self._claimed_at = now
        return True

    def abandon_term(self, now: float) -> float | None:
        """Give up the local term, which has failed, and claim none for a while; return how long.

        A standby leads meanwhile. A single scheduler leads again afterwards, if only to fail again:
        then the pause doubles, up to a limit, so that the cluster is not busy with terms that do
        nothing. None: an earlier pause is still running.
        """
        if now < self._failed_until:
            return None
        if now - self._claimed_at >= SOUND_TERM_S:
            self.failures = 0
        longest_s = min(self._restart_s * 2 ** min(self.failures, 16), RESTART_PAUSE_MAX_S)
        pause_s = longest_s * self._chance.uniform(0.5, 1.0)  # jitter: two must not fail in step
        self.failures += 1
        self.term = None
        self._quiet_since = -self._quiet_s
        self._failed_until = now + pause_s
        return pause_s

    def make_way(self) -> None:
        """Give up the local term, for a standby to claim the next one."""
        self.term = None

    def resign(self) -> None:
        self._leaving = True
        self.term = None

    def _count(self, term: Term) -> bool:
        """Record a term number, unless it is too far ahead of the known maximum.

        A number equally far below it shows that the maximum was forged, or is long out of date,
        unless a scheduler leads with such a number: then the lower one is what is out of date.
        """
        known, leader = self._number_max, self._leader
        if not term.may_follow(known):
            return False
        led = self.term is not None or (leader is not None and not leader.may_follow(term.number))
        if known is None or (not led and term.number + TERM_JUMP_MAX < known):
            self._number_max = term.number
        else:
            self._number_max = max(known, term.number)
        return True
