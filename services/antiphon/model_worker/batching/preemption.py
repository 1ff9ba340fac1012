"""Who gives way: when the pages run out, and to whoever outranks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from antiphon.model_worker.batching.policy import QueueRules
    from antiphon.model_worker.batching.request import Request


def choose_victim(running: Iterable[Request]) -> Request:
    """The request that gives way when pages run out.

    Those who were overtaken for too long stay, then those who outrank the others; of equals the
    one goes that loses least by starting over: fewest outputs, then the latest arrival.
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
    """The running requests that give way to a waiting one that outranks them by enough.

    The lowest rank first, then whoever came last. Nobody is preempted in vain: if all of them
    together do not leave enough, none is.

    Args:
        candidate: Who waits.
        running: Who may give way.
        rules: By how much it must outrank them.
        short: Pages a group that it lacks.
        gains: Pages a group that a running request leaves, those promised to it included.
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
