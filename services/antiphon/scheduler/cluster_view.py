"""What workers report of requests; followed by leader and standbys alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.service.followed_lists import FollowedLists, running_content
from antiphon.wire.base import Process
from antiphon.wire.heartbeat import FetchRunningList

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.wire.base import Attempt
    from antiphon.wire.heartbeat import (
        Heartbeat,
        RunningList,
        RunningListState,
        RunningRequest,
        WorkerLoad,
    )
    from antiphon.wire.ids import RequestId


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    attempt: Attempt
    worker: Process
    detokenizer: Process | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker holds by a heartbeat.

    Requests in `ended` have sent their last token and wait for the gateway to read it.
    """

    beat: Heartbeat
    received_at: float
    lines: tuple[RunningRequest, ...]
    held: Mapping[RequestId, Attempt]
    detokenizers: Mapping[RequestId, Process | None]
    ended: set[RequestId]


class WorkerAssignments:
    """The attempts in each live worker's last report.

    A heartbeat whose list is not known completely is no report: the whole list is requested.
    """

    def __init__(self) -> None:
        self._reports: dict[Process, WorkerReport] = {}
        self._lists = FollowedLists(running_content)
        self._beats: dict[Process, Heartbeat] = {}  # the last ones
        self._incomplete: dict[Process, RunningListState] = {}  # those of the last heartbeats
        self._fetches: list[FetchRunningList] = []

    def apply(self, beat: Heartbeat, load: WorkerLoad, now: float) -> WorkerReport | None:
        """Apply a worker's heartbeat, and return its report.

        None if it was applied before, or if what it lists is not known.
        """
        worker = beat.process
        if self._beats.get(worker) is beat:
            return None
        self._beats[worker] = beat
        self._incomplete.pop(worker, None)
        if load.listed is None:
            return self._report(beat, load.running, now)
        if (change := self._lists.compare(worker, load.listed, now)) is None:
            return None
        if change.lines is None:
            self._incomplete[worker] = load.listed
            self._fetches.append(FetchRunningList(worker=worker))
            return None
        return self._report(beat, tuple(change.lines.values()), now)

    def apply_list(self, message: RunningList, now: float) -> WorkerReport | None:
        """Apply a worker's changes; return a report if they are what its last heartbeat lists."""
        worker = message.worker
        self._lists.update(worker, message, now)
        if (listed := self._incomplete.get(worker)) is None:
            return None
        change = self._lists.compare(worker, listed, now)
        if change is None or change.lines is None:
            return None
        del self._incomplete[worker]
        return self._report(self._beats[worker], tuple(change.lines.values()), now)

    def take_fetches(self) -> list[FetchRunningList]:
        fetches, self._fetches = self._fetches, []
        return fetches

    def _report(
        self, beat: Heartbeat, lines: tuple[RunningRequest, ...], now: float
    ) -> WorkerReport:
        report = self._reports[beat.process] = WorkerReport(
            beat,
            now,
            lines,
            # A requeued request is not held: it must not count as running there.
            {held.request_id: held.attempt for held in lines if not held.returned},
            {held.request_id: _detokenizer(held) for held in lines},
            {held.request_id for held in lines if held.ended},
        )
        return report

    def find(self, request_id: RequestId, attempt: Attempt | None = None) -> HeldAttempt | None:
        """Return where a request is held: the given attempt of it, or by default the highest."""
        found = [
            HeldAttempt(report.held[request_id], worker, report.detokenizers[request_id])
            for worker, report in self._reports.items()
            if request_id in report.held and attempt in (None, report.held[request_id])
        ]
        return max(found, key=lambda holding: holding.attempt, default=None)

    def reported_since(self, worker: Process, since: float) -> bool:
        report = self._reports.get(worker)
        return report is not None and report.received_at > since

    def forget(self, worker: Process) -> None:
        self._lists.forget(worker)
        for table in (self._reports, self._beats, self._incomplete):
            table.pop(worker, None)


def _detokenizer(held: RunningRequest) -> Process | None:
    if held.detokenizer is None or held.detokenizer_incarnation is None:
        return None
    return Process(instance=held.detokenizer, incarnation=held.detokenizer_incarnation)
