"""Tombstones of attempts that must not start again while an admit of them may be in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.base import Attempt
    from antiphon.wire.ids import RequestId


class AttemptTombstones:
    """Keeps each for `kept_ms` at least and twice that at most, so expiry needs no search."""

    def __init__(self, kept_ms: int) -> None:
        self._kept_ms = kept_ms
        self._young: dict[RequestId, Attempt] = {}
        self._old: dict[RequestId, Attempt] = {}
        self._aged_at_ms = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, request_id: RequestId, attempt: Attempt) -> None:
        """Add a tombstone for this attempt and all before it."""
        self._young[request_id] = max(attempt, self._young.get(request_id, attempt))

    def covers(self, request_id: RequestId, attempt: Attempt) -> bool:
        """Whether there is a tombstone of an attempt."""
        attempts = (table.get(request_id) for table in (self._young, self._old))
        return any(last is not None and attempt <= last for last in attempts)

    def expire(self, now_ms: int) -> None:
        """Drop old tombstones; called several times a second."""
        if now_ms - self._aged_at_ms >= self._kept_ms:
            self._young, self._old = {}, self._young
            self._aged_at_ms = now_ms
