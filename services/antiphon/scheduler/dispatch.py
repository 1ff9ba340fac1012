"""Picks the next waiting request and the worker that it goes to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.errors import PromptTooLong

if TYPE_CHECKING:
    from antiphon.scheduler.placement import Placement, PlacementTarget
    from antiphon.scheduler.queue import SchedulerQueue
    from antiphon.scheduler.request_table import RequestEntry, RequestTable
    from antiphon.service.clock import Clock
    from antiphon.wire.base import Process
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import RequestId
    from antiphon.wire.submit import SubmitRequest

QUEUE_SCAN_MAX = 64
"""How many waiting requests are checked for a worker that those before them cannot use."""


@dataclass(frozen=True, slots=True)
class QueueExit:
    """A request that leaves the queue.

    Attributes:
        place: Where it goes; None if it ends instead.
        error: The error that it ends with; None if its gateway has closed it by now.
    """

    entry: RequestEntry
    submit: SubmitRequest
    place: PlacementTarget | None = None
    error: EngineError | None = None


class Dispatcher:
    """Finds the next request that can leave the queue. Changes neither queue nor table."""

    def __init__(
        self, queue: SchedulerQueue, ledger: RequestTable, placement: Placement, clock: Clock
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._placement = placement
        self._clock = clock

    def next(self) -> QueueExit | None:
        """Find the next request; None while all of them must wait.

        A waiting request reserves the workers that could run it against the requests behind it, and
        no other workers. Where all slots are taken, the request of the highest rank goes to a
        worker where it preempts others.
        """
        reserved: set[Process] = set()
        for request_id in itertools.islice(self._queue.in_order(self._clock.now()), QUEUE_SCAN_MAX):
            match = self._match(request_id, reserved)
            if match is not None:
                return match
            reserved |= self._placement.able(self._waiting(request_id)[1], self._ledger)
            if not self._placement.has_free_slots_outside(reserved, self._ledger):
                break
        return self._match_over()

    def _match(self, request_id: RequestId, reserved: set[Process]) -> QueueExit | None:
        entry, submit = self._waiting(request_id)
        if entry.deadline_unix_ms <= self._clock.unix_ms():
            return QueueExit(entry, submit)
        try:
            self._placement.check(submit)
        except PromptTooLong as error:
            return QueueExit(entry, submit, error=error)
        place = self._placement.choose(submit, self._ledger, avoid=entry.requeued_by, kept=reserved)
        return None if place is None else QueueExit(entry, submit, place)

    def _match_over(self) -> QueueExit | None:
        request_id = self._queue.highest()
        if request_id is None:
            return None
        entry, submit = self._waiting(request_id)
        place = self._placement.choose_preempting(submit, self._ledger)
        return None if place is None else QueueExit(entry, submit, place)

    def _waiting(self, request_id: RequestId) -> tuple[RequestEntry, SubmitRequest]:
        entry = self._ledger.find(request_id)
        assert entry is not None, "a queued request is not in the request table"
        assert entry.submit is not None, "a queued request has no submit"
        return entry, entry.submit
