"""In which order waiting requests are admitted: the lowest key is next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.model_worker.batching.request import Request


def fcfs(request: Request) -> int:
    """First come, first served. A retracted request keeps its place, so nobody starves it."""
    return request.arrival
