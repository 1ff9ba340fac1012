"""Pages for the next token of whoever runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.batching.admission import find_pages
from antiphon.model_worker.batching.retraction import choose_victim

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.cache.index import PrefixIndex
    from antiphon.model_worker.cache.table import CachePools


def grow(
    running: dict[int, Request],
    pools: CachePools,
    index: PrefixIndex,
    retract: Callable[[Request], None],
) -> None:
    """Give every running request pages for the tokens that it knows, retracting some if it must.

    The oldest are served first. A request that runs alone always fits, as `check` saw to, so
    somebody is left. `retract` takes its victim out of `running`.
    """
    short = [request for request in running.values() if not request.covered]
    for request in sorted(short, key=lambda r: r.arrival):
        while request.slot in running and request.table is not None:
            if find_pages(request.table.need(request.length), pools, index):
                request.table.allocate(request.length)
                break
            retract(choose_victim(running.values()))
