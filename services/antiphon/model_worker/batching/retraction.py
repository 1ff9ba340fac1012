"""Who gives way when the pages run out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.model_worker.batching.request import Request


def choose_victim(running: Iterable[Request]) -> Request:
    """The request that loses least by starting over: fewest outputs, then the latest arrival."""
    return min(running, key=lambda request: (request.outputs, -request.arrival))
