"""What a worker reads from the heartbeats of the others: numerics, and where requests may go."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.config.cluster import differing
from antiphon.service.startup import CannotStart
from antiphon.wire.base import Process, ProcessState, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.service.peers import Peer
    from antiphon.wire.heartbeat import Heartbeat, WorkerLoad
    from antiphon.wire.ids import ModelName


LIST_READERS = (Role.SCHEDULER, Role.GATEWAY, Role.WORKER)
"""Those that read what a worker's heartbeat says of the requests that it holds."""


class NumericsCheck:
    """Compares this worker's numerics with those of the other workers.

    A request may continue on another worker, or be repeated there: with other numerics its output
    would differ. The later worker ends; of two that start at once, one of them. The `digest` is
    empty if inference is not deterministic.
    """

    def __init__(self, process: Process, model: ModelName, digest: str) -> None:
        self.digest = digest
        self._process = process
        self._model = model
        self._conflict: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def compare(self, beat: Heartbeat, state: ProcessState) -> None:
        if beat.worker is None or beat.state is ProcessState.DRAINING or beat.model != self._model:
            return
        if beat.worker.bits == self.digest or self._conflict.done():
            return
        if state is ProcessState.STARTING or beat.process.incarnation < self._process.incarnation:
            theirs, names = beat.worker.bits, ("model.deterministic",)
            if theirs and self.digest:
                names = differing(self.digest, theirs)
            fields = ", ".join(names)
            message = f"{beat.process.instance} computes this model with other numerics: {fields}"
            self._conflict.set_result(message)

    async def wait_for_conflict(self) -> None:
        """Wait until this worker has to end; raises `CannotStart`, which names the differences."""
        raise CannotStart(await self._conflict)


def other_workers(peers: Iterable[Peer], model: ModelName | None) -> list[WorkerLoad]:
    """The loads of those workers that could run requests of this model."""
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
        max(0, load.running_max - load.live)
        for load in loads
        if load.pages_free > load.pages_promised
    )
