"""The choice of requests to retract when pages run out, or to preempt by priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from antiphon.model_worker.batching.policy import QueueRules
    from antiphon.model_worker.batching.request import Request


def choose_victim(running: Iterable[Request]) -> Request:
    """The request that is retracted when pages run out.

    Urgent requests stay, then those of higher priority; of equals the one is chosen that loses
    least by starting over: fewest outputs, then the latest arrival.
    """
    return min(
        running,
        key=lambda request: (
            request.urgent,
            -request.rank,
            request.outputs,
            -request.arrival,
        ),
    )


def choose_preempted(
    candidate: Request,
    running: Iterable[Request],
    rules: QueueRules,
    short: Sequence[int],
    gains: Callable[[Request], Sequence[int]],
) -> list[Request]:
    """The running requests to preempt for a waiting one whose priority is enough higher.

    The lowest priority first, then the latest arrival. None is preempted in vain: if all of them
    together do not free enough pages, the result is empty.

    Args:
        candidate: The waiting request.
        running: Requests that may be preempted.
        rules: By how much the priorities must differ.
        short: Pages by group that the candidate lacks.
        gains: Pages by group that a running request frees, those reserved for it included.
    """
    weakest = [
        request
        for request in running
        if not request.urgent and rules.preempts(candidate.rank, request.rank)
    ]
    weakest.sort(key=lambda request: (-request.rank, -request.arrival))
    missing = list(short)
    for count, victim in enumerate(weakest, start=1):
        missing = [lack - gain for lack, gain in zip(missing, gains(victim), strict=True)]
        if max(missing) <= 0:
            return weakest[:count]
    return []
