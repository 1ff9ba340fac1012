"""Page allocation for the scheduled rows of running requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.batching.preemption import choose_victim

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from antiphon.model_worker.batching.page_budget import PageBudget
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.slots import Slots

ScheduledRow = tuple["Request", int]
"""A running request, and the end of its next row in tokens of the request."""


def ensure_pages(
    scheduled: list[ScheduledRow],
    budget: PageBudget,
    slots: Slots,
    running: Callable[[], Collection[Request]],
    retract: Callable[[Request], None],
) -> list[ScheduledRow]:
    """Allocate the pages of the scheduled rows, retracting requests if pages run out.

    The oldest requests are served first. A request that runs alone always fits, because
    `admission.check` saw to that, so at least one row remains. Where enough pages are pending free,
    because a launched plan may still read them, no request is retracted: the row that needs them
    is left out of this plan.

    Args:
        scheduled: Rows that need pages.
        budget: Where pages are allocated.
        slots: Where the new page tables are written.
        running: All requests that could be retracted.
        retract: Retracts a request, which removes it from `running`.

    Returns:
        The scheduled rows that have their pages, in the same order.
    """
    short = [row for row in scheduled if not _covered(*row)]
    if not short:
        return scheduled
    if len(short) > 1:
        # One eviction for all: page by page it took longer than all else in a decode step.
        budget.ensure_free(pages_needed(short))
        short.sort(key=lambda row: row[0].arrival)
    for request, end in short:
        # The request may have been retracted itself, for an earlier row: then it has no table.
        while request.table is not None and not budget.allocate(request.table, end):
            if budget.pending_free(request.table.need(end)):
                break
            retract(choose_victim(running()))
        if _covered(request, end):
            slots.update(request)
    return [row for row in scheduled if _covered(*row)]


def pages_needed(scheduled: Sequence[ScheduledRow]) -> list[int]:
    """Pages by group that all of these rows still need."""
    each = [request.table.need(end) for request, end in scheduled if request.table is not None]
    return [sum(needs) for needs in zip(*each, strict=True)]


def _covered(request: Request, end: int) -> bool:
    """Whether the request still runs and has pages for its row."""
    return request.table is not None and request.table.covers(end)
