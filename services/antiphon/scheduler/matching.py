"""Who of those that wait goes where next."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.errors import PromptTooLong

if TYPE_CHECKING:
    from antiphon.scheduler.ledger import Entry, Ledger
    from antiphon.scheduler.placement import Place, Placement
    from antiphon.scheduler.queue import Queue
    from antiphon.service.clock import Clock
    from antiphon.wire.base import Process
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import RequestId
    from antiphon.wire.submit import SubmitRequest

LINE_MAX = 64
"""How many who wait are asked whether they could go to a worker that those before them cannot."""


@dataclass(frozen=True, slots=True)
class Match:
    """Somebody who leaves the queue.

    Attributes:
        place: Where it goes; None if it ends instead.
        error: What it ends with; None if nobody waits for its end any more.
    """

    entry: Entry
    submit: SubmitRequest
    place: Place | None = None
    error: EngineError | None = None


class Matching:
    """Looks along the queue for somebody who can leave it. Changes neither queue nor ledger."""

    def __init__(self, queue: Queue, ledger: Ledger, placement: Placement, clock: Clock) -> None:
        self._queue = queue
        self._ledger = ledger
        self._placement = placement
        self._clock = clock

    def next(self) -> Match | None:
        """Find the next one; None while everybody must wait.

        Who must wait keeps the workers that could run it from those behind it, and no others. Where
        all places are taken, the highest by rank goes where others give way to it.
        """
        kept: set[Process] = set()
        for request_id in itertools.islice(self._queue.line(self._clock.now()), LINE_MAX):
            match = self._match(request_id, kept)
            if match is not None:
                return match
            kept |= self._placement.able(self._waiting(request_id)[1], self._ledger)
            if not self._placement.open_beside(kept, self._ledger):
                break
        return self._match_over()

    def _match(self, request_id: RequestId, kept: set[Process]) -> Match | None:
        entry, submit = self._waiting(request_id)
        if entry.deadline_unix_ms <= self._clock.unix_ms():
            return Match(entry, submit)
        try:
            self._placement.check(submit)
        except PromptTooLong as error:
            return Match(entry, submit, error=error)
        place = self._placement.choose(submit, self._ledger, avoid=entry.returned_by, kept=kept)
        return None if place is None else Match(entry, submit, place)

    def _match_over(self) -> Match | None:
        request_id = self._queue.highest()
        if request_id is None:
            return None
        entry, submit = self._waiting(request_id)
        place = self._placement.choose_over(submit, self._ledger)
        return None if place is None else Match(entry, submit, place)

    def _waiting(self, request_id: RequestId) -> tuple[Entry, SubmitRequest]:
        entry = self._ledger.find(request_id)
        assert entry is not None, "somebody waits whom nobody knows"
        assert entry.submit is not None, "somebody waits who was never submitted"
        return entry, entry.submit
