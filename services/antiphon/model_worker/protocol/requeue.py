"""Whether waiting requests should be requeued to another worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.service.peers import Peer
    from antiphon.wire.heartbeat import WorkerLoad
    from antiphon.wire.ids import ModelName


def other_workers(peers: Iterable[Peer], model: ModelName | None) -> list[WorkerLoad]:
    """The loads of the other workers that could run requests of this model.

    Args:
        peers: Workers that accept new work.
        model: The model of this worker.
    """
    return [
        peer.heartbeat.worker
        for peer in peers
        if peer.heartbeat.model == model
        and peer.heartbeat.worker is not None
        and not peer.heartbeat.worker.paused
    ]


def longest_elsewhere(loads: Iterable[WorkerLoad], context_tokens: int) -> int | None:
    """The longest request that other workers can run; None if that is our context or more."""
    longest = max((load.context_tokens for load in loads), default=0)
    return None if longest >= context_tokens else longest


def free_slots(loads: Iterable[WorkerLoad]) -> int:
    """How many requests other workers could start now: free slots, with pages not reserved."""
    return sum(
        max(0, load.running_max - sum(not line.ended for line in load.running))
        for load in loads
        if load.pages_free > load.pages_promised
    )
