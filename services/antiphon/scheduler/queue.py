"""The requests that wait for a worker, in order, and how fast they leave."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.ids import RequestId

WINDOW = 64
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0


class Queue:
    """First come, first served; at most `places` may wait."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: OrderedDict[RequestId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    @property
    def full(self) -> bool:
        """Whether one more must be refused."""
        return len(self._waiting) >= self._places

    def push(self, request_id: RequestId) -> None:
        """Add at the end."""
        self._waiting[request_id] = None

    def put_back(self, request_id: RequestId) -> None:
        """Add at the front, even over the bound: it has waited once and was accepted."""
        self._waiting[request_id] = None
        self._waiting.move_to_end(request_id, last=False)

    def first(self) -> RequestId | None:
        """Return who is next, leaving it there."""
        return next(iter(self._waiting), None)

    def remove(self, request_id: RequestId) -> None:
        """Take out, wherever it stands. Unknown ids are fine."""
        self._waiting.pop(request_id, None)

    def position(self, request_id: RequestId) -> int:
        """Count who is before it; 0 also for one that does not wait."""
        if request_id not in self._waiting:
            return 0
        return next(n for n, waiting in enumerate(self._waiting) if waiting == request_id)


class DrainRate:
    """How fast requests leave the queue, from the times of the last ones."""

    def __init__(self) -> None:
        self._left: deque[float] = deque(maxlen=WINDOW)

    def leave(self, now: float) -> None:
        """One request has got its worker."""
        self._left.append(now)

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Estimate when a place is free that so many others do not take first.

        With nothing measured yet it is the least.
        """
        if not self._left or waiting == 0:
            return RETRY_AFTER_MIN_S
        # Counted until now, not until the last one left: a queue that stands still gets slower.
        each_s = (now - self._left[0]) / len(self._left)
        return min(max(waiting * each_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
