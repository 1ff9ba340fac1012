"""Who leads one model's queue. No lock: the highest term leads, silence makes a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.scheduler.rules import QUIET_BEATS, Rules
from antiphon.wire.base import Process, Term

if TYPE_CHECKING:
    from antiphon.wire.heartbeat import Heartbeat


class Leadership:
    """One scheduler's view of the terms.

    Attributes:
        term: Our own while we lead.
    """

    def __init__(self, process: Process, rules: Rules, now: float) -> None:
        self.term: Term | None = None
        self._process = process
        self._quiet_s = rules.beats(QUIET_BEATS)
        self._leader: Term | None = None  # another scheduler's, while it lives and says so
        self._number_max = 0
        self._quiet_since = now
        self._leaving = False

    @property
    def highest(self) -> Term | None:
        """The term that leads as far as we know: our own, or another's."""
        return self.term or self._leader

    def see(self, term: Term) -> None:
        """Learn of a term from whoever names one. A higher one ends ours."""
        if not term.may_follow(self._number_max):
            return
        self._number_max = max(self._number_max, term.number)
        if self.term is not None and term > self.term:
            self.term = None

    def hear(self, heartbeat: Heartbeat) -> None:
        """Take in another scheduler's heartbeat."""
        if heartbeat.leads is None or heartbeat.leads.scheduler != heartbeat.process:
            self.lose(heartbeat.process)
            return
        if not heartbeat.leads.may_follow(self._number_max):
            return
        self.see(heartbeat.leads)
        if self._leader is None or heartbeat.leads > self._leader:
            self._leader = heartbeat.leads

    def lose(self, scheduler: Process) -> None:
        """A scheduler has died or leads no more: if it led, its place is free at once."""
        if self._leader is not None and self._leader.scheduler == scheduler:
            self._leader = None
            self._quiet_since = -self._quiet_s

    def wait(self, now: float) -> None:
        """Nobody can be heard: silence until now means nothing."""
        self._quiet_since = now

    def claim(self, now: float) -> bool:
        """Take the next term if nobody has it. True when that happens."""
        if self._leaving or self.term is not None or self._leader is not None:
            return False
        if now - self._quiet_since < self._quiet_s:
            return False
        self._number_max += 1
        self.term = Term(number=self._number_max, scheduler=self._process)
        return True

    def renounce(self) -> None:
        """Give up our term, and take the next one as soon as no other scheduler leads."""
        self.term = None
        self._quiet_since = -self._quiet_s

    def resign(self) -> None:
        """Lead no more, ever: this process leaves."""
        self._leaving = True
        self.term = None
