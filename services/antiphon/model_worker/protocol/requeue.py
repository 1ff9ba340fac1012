"""When requests that wait here are better run elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.service.peers import Peer
    from antiphon.wire.heartbeat import WorkerLoad
    from antiphon.wire.ids import ModelName


def other_workers(peers: Iterable[Peer], model: ModelName | None) -> list[WorkerLoad]:
    """The loads of the workers that could run what we have.

    Args:
        peers: Workers that take new work.
        model: What we serve.
    """
    return [
        peer.heartbeat.worker
        for peer in peers
        if peer.heartbeat.model == model
        and peer.heartbeat.worker is not None
        and not peer.heartbeat.worker.paused
    ]


def longest_elsewhere(loads: Iterable[WorkerLoad], context_tokens: int) -> int | None:
    """The longest request that others hold; None if that is as long as ours can be."""
    longest = max((load.context_tokens for load in loads), default=0)
    return None if longest >= context_tokens else longest


def free_slots(loads: Iterable[WorkerLoad]) -> int:
    """How many requests others could start now: they have slots, and pages that nobody expects."""
    return sum(
        max(0, load.running_max - sum(not line.ended for line in load.running))
        for load in loads
        if load.pages_free > load.pages_promised
    )
