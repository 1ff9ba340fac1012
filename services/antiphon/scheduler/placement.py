"""Which worker and which detokenizer a request gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.base import Process, Role

if TYPE_CHECKING:
    from antiphon.scheduler.ledger import Ledger
    from antiphon.scheduler.rules import Rules
    from antiphon.service.peers import Peer, Peers
    from antiphon.wire.heartbeat import WorkerLoad
    from antiphon.wire.ids import InstanceId, ModelName


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes."""

    worker: Process
    load: WorkerLoad
    detokenizer: InstanceId


class Placement:
    """Chooses the least loaded worker with credit, and keeps one detokenizer for each worker.

    One detokenizer a worker keeps what a step produces one message.
    """

    def __init__(self, model: ModelName, peers: Peers, rules: Rules) -> None:
        self._model = model
        self._peers = peers
        self._rules = rules
        self._detokenizers: dict[InstanceId, InstanceId] = {}

    def choose(self, prompt_ids: bytes, ledger: Ledger) -> Place | None:
        """Find a place for a prompt; None while it must wait."""
        best: tuple[float, Peer, WorkerLoad] | None = None
        for peer in self._working(Role.WORKER):
            load = peer.beat.worker
            if load is None or load.paused or stalled(load, self._rules.stall_s):
                continue
            account = ledger.account(peer.process)
            if not account.takes(load, self._rules.look_ahead, prompt_ids):
                continue
            share = account.occupied / load.running_max
            if best is None or share < best[0]:
                best = (share, peer, load)
        if best is None:
            return None
        _, peer, load = best
        detokenizer = self._detokenizer_of(peer.process.instance)
        return Place(peer.process, load, detokenizer) if detokenizer is not None else None

    def _detokenizer_of(self, worker: InstanceId) -> InstanceId | None:
        ready = [peer.process.instance for peer in self._working(Role.DETOKENIZER)]
        kept = self._detokenizers.get(worker)
        if kept in ready:
            return kept
        if not ready:
            return None
        workers = {peer.process.instance for peer in self._working(Role.WORKER)}
        self._detokenizers = {w: d for w, d in self._detokenizers.items() if w in workers}
        taken = list(self._detokenizers.values())
        chosen = min(ready, key=taken.count)
        self._detokenizers[worker] = chosen
        return chosen

    def _working(self, role: Role) -> list[Peer]:
        return [peer for peer in self._peers.working(role) if peer.beat.model == self._model]


def stalled(load: WorkerLoad, stall_s: float) -> bool:
    """Whether work is in flight and no step has ended for too long."""
    return any(not held.ended for held in load.running) and load.step_age_s > stall_s
