"""Ids of requests that must not run again: cancelled, or ended by their gateway."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.base import Process
    from antiphon.wire.ids import RequestId

TOMBSTONES_MAX = 65_536
"""Maximum number of ids; beyond it the one that expires first is dropped."""


class SchedulerTombstones:
    """Ended ids, each until a wall-clock time."""

    def __init__(self) -> None:
        self._dead: dict[RequestId, tuple[Process, int]] = {}
        self._expiry: list[tuple[int, RequestId]] = []

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._dead

    def __len__(self) -> int:
        return len(self._dead)

    def add(self, request_id: RequestId, owner: Process, until_unix_ms: int) -> None:
        """Add an id, or extend its time."""
        _, until = self._dead.get(request_id, (owner, 0))
        if until_unix_ms <= until:
            return
        self._dead[request_id] = (owner, until_unix_ms)
        heapq.heappush(self._expiry, (until_unix_ms, request_id))
        while len(self._expiry) > TOMBSTONES_MAX:
            self._pop()

    def was_ended_by(self, request_id: RequestId, owner: Process) -> bool:
        """Whether the id is of an ended request of this owner; another owner may reuse it."""
        dead = self._dead.get(request_id)
        return dead is not None and dead[0] == owner

    def expire(self, unix_ms: int) -> None:
        """Drop ids whose late submits can no longer arrive."""
        while self._expiry and self._expiry[0][0] <= unix_ms:
            self._pop()

    def _pop(self) -> None:
        until, request_id = heapq.heappop(self._expiry)
        # A later addition of the same id has an expiry of its own.
        if self._dead.get(request_id, (None, until))[1] == until:
            self._dead.pop(request_id, None)
