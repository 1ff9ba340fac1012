"""Attempts by worker, from the workers' heartbeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.wire.base import Attempt, Process
    from antiphon.wire.heartbeat import Heartbeat, WorkerLoad
    from antiphon.wire.ids import RequestId


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    """An attempt, and the worker that holds it."""

    attempt: Attempt
    worker: Process


class WorkerAssignments:
    """The attempts in each live worker's last report; followed by leader and standbys alike."""

    def __init__(self) -> None:
        self._held: dict[Process, Mapping[RequestId, Attempt]] = {}
        self._ended: dict[Process, set[RequestId]] = {}
        self._reported_at: dict[Process, float] = {}
        self._beats: dict[Process, Heartbeat] = {}

    def apply(self, beat: Heartbeat, load: WorkerLoad, now: float) -> bool:
        """Apply a worker's heartbeat. Returns False for one that was applied before."""
        worker = beat.process
        if self._beats.get(worker) is beat:
            return False
        self._beats[worker] = beat
        self._reported_at[worker] = now
        # A requeued request is not held: it must not count as running there.
        self._held[worker] = {
            held.request_id: held.attempt for held in load.running if not held.returned
        }
        self._ended[worker] = {held.request_id for held in load.running if held.ended}
        return True

    def of(self, worker: Process) -> Mapping[RequestId, Attempt]:
        """Return the attempts that a worker holds."""
        return self._held.get(worker, {})

    def ended(self, worker: Process) -> set[RequestId]:
        """Return those that have sent their last token and wait for the gateway to read it."""
        return self._ended.get(worker, set())

    def find(self, request_id: RequestId, attempt: Attempt | None = None) -> HeldAttempt | None:
        """Return where a request is held: the given attempt of it, or by default the highest."""
        found = [
            HeldAttempt(held[request_id], worker)
            for worker, held in self._held.items()
            if request_id in held and attempt in (None, held[request_id])
        ]
        return max(found, key=lambda holding: holding.attempt, default=None)

    def reported_since(self, worker: Process, since: float) -> bool:
        """Whether a worker has reported after `since`."""
        return self._reported_at.get(worker, since) > since

    def forget(self, worker: Process) -> None:
        """Drop the state of a dead worker."""
        self._held.pop(worker, None)
        self._ended.pop(worker, None)
        self._reported_at.pop(worker, None)
        self._beats.pop(worker, None)
