"""What workers report of requests; followed by leader and standbys alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.base import Process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.wire.base import Attempt
    from antiphon.wire.heartbeat import Heartbeat, RunningRequest, WorkerLoad
    from antiphon.wire.ids import RequestId


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    attempt: Attempt
    worker: Process
    detokenizer: Process | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker holds by its last heartbeat.

    Requests in `ended` have sent their last token and wait for the gateway to read it.
    """

    beat: Heartbeat
    received_at: float
    held: Mapping[RequestId, Attempt]
    detokenizers: Mapping[RequestId, Process | None]
    ended: set[RequestId]


class WorkerAssignments:
    """The attempts in each live worker's last report."""

    def __init__(self) -> None:
        self._reports: dict[Process, WorkerReport] = {}

    def apply(self, beat: Heartbeat, load: WorkerLoad, now: float) -> WorkerReport | None:
        """Apply a worker's heartbeat, and return its report; None if it was applied before."""
        before = self._reports.get(beat.process)
        if before is not None and before.beat is beat:
            return None
        report = self._reports[beat.process] = WorkerReport(
            beat,
            now,
            # A requeued request is not held: it must not count as running there.
            {held.request_id: held.attempt for held in load.running if not held.returned},
            {held.request_id: _detokenizer(held) for held in load.running},
            {held.request_id for held in load.running if held.ended},
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
        self._reports.pop(worker, None)


def _detokenizer(held: RunningRequest) -> Process | None:
    if held.detokenizer is None or held.detokenizer_incarnation is None:
        return None
    return Process(instance=held.detokenizer, incarnation=held.detokenizer_incarnation)
