"""Pages for the next tokens of whoever runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.batching.preemption import choose_victim

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from antiphon.model_worker.batching.page_budget import PageBudget
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.slots import Slots

ScheduledRow = tuple["Request", int]
"""A running request, and up to which of its tokens the next row goes."""


def ensure_pages(
    scheduled: list[ScheduledRow],
    budget: PageBudget,
    slots: Slots,
    running: Callable[[], Collection[Request]],
    retract: Callable[[Request], None],
) -> list[ScheduledRow]:
    """Give running requests the pages of their next row, retracting some if it must.

    The oldest are served first. A request that runs alone always fits, as `check` saw to, so
    somebody is left. Where pages are on their way back, because a launched plan may still read
    them, nobody is retracted: whoever waits for them has no row in this plan.

    Args:
        scheduled: Rows to make room for.
        budget: Where pages are found.
        slots: Where they are written down.
        running: All that could give way.
        retract: Takes its victim out of `running`.

    Returns:
        Those of `wants` that have their pages, in their order.
    """
    short = [row for row in scheduled if not _covered(*row)]
    if not short:
        return scheduled
    if len(short) > 1:
        # One eviction for all: page by page it took longer than all else in a step of decodes.
        budget.ensure_free(pages_needed(short))
        short.sort(key=lambda row: row[0].arrival)
    for request, end in short:
        # Its table goes when it is retracted itself, maybe for one before it.
        while request.table is not None and not budget.allocate(request.table, end):
            if budget.pending_free(request.table.need(end)):
                break
            retract(choose_victim(running()))
        if _covered(request, end):
            slots.update(request)
    return [row for row in scheduled if _covered(*row)]


def pages_needed(scheduled: Sequence[ScheduledRow]) -> list[int]:
    """Pages a group that all of these rows take yet."""
    each = [request.table.need(end) for request, end in scheduled if request.table is not None]
    return [sum(needs) for needs in zip(*each, strict=True)]


def _covered(request: Request, end: int) -> bool:
    """Whether it runs, and has pages for its row."""
    return request.table is not None and request.table.covers(end)
