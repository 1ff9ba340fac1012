"""Which worker holds which attempt, by the workers' own heartbeats."""

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
    """What each live worker held when it last spoke. Leader and standbys keep it alike."""

    def __init__(self) -> None:
        self._held: dict[Process, Mapping[RequestId, Attempt]] = {}
        self._ended: dict[Process, set[RequestId]] = {}
        self._reported_at: dict[Process, float] = {}
        self._beats: dict[Process, Heartbeat] = {}

    def apply(self, beat: Heartbeat, load: WorkerLoad, now: float) -> bool:
        """Take in a worker's heartbeat. False for one that was taken before."""
        worker = beat.process
        if self._beats.get(worker) is beat:
            return False
        self._beats[worker] = beat
        self._reported_at[worker] = now
        # What it gives back it does not hold: nobody is to be told that it runs there.
        self._held[worker] = {
            held.request_id: held.attempt for held in load.running if not held.returned
        }
        self._ended[worker] = {held.request_id for held in load.running if held.ended}
        return True

    def of(self, worker: Process) -> Mapping[RequestId, Attempt]:
        """Return what one worker holds."""
        return self._held.get(worker, {})

    def ended(self, worker: Process) -> set[RequestId]:
        """Return what of it has said its last token, and waits for its owner to have read it."""
        return self._ended.get(worker, set())

    def find(self, request_id: RequestId, attempt: Attempt | None = None) -> HeldAttempt | None:
        """Return who holds a request: this attempt of it, or else the highest one."""
        found = [
            HeldAttempt(held[request_id], worker)
            for worker, held in self._held.items()
            if request_id in held and attempt in (None, held[request_id])
        ]
        return max(found, key=lambda holding: holding.attempt, default=None)

    def reported_since(self, worker: Process, since: float) -> bool:
        """Whether a worker has reported since then."""
        return self._reported_at.get(worker, since) > since

    def forget(self, worker: Process) -> None:
        """The worker is dead, and so is what it held."""
        self._held.pop(worker, None)
        self._ended.pop(worker, None)
        self._reported_at.pop(worker, None)
        self._beats.pop(worker, None)
