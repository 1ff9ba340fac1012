"""Attempts that must not begin again, for as long as an admit of them may be under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.base import Attempt
    from antiphon.wire.ids import RequestId


class AttemptTombstones:
    """Keeps each for `kept_ms` at least and twice that at most: nothing is searched to forget."""

    def __init__(self, kept_ms: int) -> None:
        self._kept_ms = kept_ms
        self._young: dict[RequestId, Attempt] = {}
        self._old: dict[RequestId, Attempt] = {}
        self._aged_at_ms = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, request_id: RequestId, attempt: Attempt) -> None:
        """Let this attempt and all before it never begin."""
        self._young[request_id] = max(attempt, self._young.get(request_id, attempt))

    def covers(self, request_id: RequestId, attempt: Attempt) -> bool:
        """Whether an attempt was buried."""
        buried = (table.get(request_id) for table in (self._young, self._old))
        return any(last is not None and attempt <= last for last in buried)

    def expire(self, now_ms: int) -> None:
        """Forget what is old; called several times a second."""
        if now_ms - self._aged_at_ms >= self._kept_ms:
            self._young, self._old = {}, self._young
            self._aged_at_ms = now_ms
