"""The scheduler's protocol as a pure state machine: events in, actions out, the clock passed in.

It stands by while another scheduler leads, and leads until one with a higher term does. In both
states it receives the same input: liveness (from `PeerTable`), the requests that workers hold, and
those that gateways have open.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.scheduler.cluster_view import WorkerAssignments, WorkerReport
from antiphon.scheduler.election import LeaderElection
from antiphon.scheduler.leader_config import READY_TIMEOUT_BEATS, UNECHOED_BEATS, LeaderConfig
from antiphon.scheduler.leader_term import LeaderTerm
from antiphon.scheduler.placement import stalled
from antiphon.scheduler.reconciliation import Reconciliation
from antiphon.scheduler.worker_caches import WorkerCaches
from antiphon.service.followed_lists import OpenLists
from antiphon.service.peers import Liveness, Peer, PeerChange, PeerTable
from antiphon.wire.base import Attempt, Process, Role, Term, leading_term
from antiphon.wire.errors import EngineError, Unavailable, WrongTerm
from antiphon.wire.submit import FetchOpenList

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.scheduler.outbox import Action, SealCall
    from antiphon.service.clock import Clock
    from antiphon.wire.heartbeat import FetchRunningList, RunningList, WorkerLoad
    from antiphon.wire.ids import InstanceId, ModelName, RequestId
    from antiphon.wire.seal import AttemptsSealed
    from antiphon.wire.submit import (
        AdoptRequest,
        CancelAccepted,
        CancelRequest,
        OpenList,
        OpenListState,
        RequestAdopted,
        SubmitAccepted,
        SubmitRequest,
    )

log = logging.getLogger(__name__)


class SchedulerCore:
    """One scheduler process. Each event may leave actions behind, which `take_actions` returns.

    Events and replays of the workers' prefix caches go to `caches` directly.
    """

    def __init__(
        self,
        process: Process,
        model: ModelName,
        rules: LeaderConfig,
        clock: Clock,
        peers: PeerTable,
    ) -> None:
        self._model = model
        self._rules = rules
        self._clock = clock
        self._peers = peers
        self._leadership = LeaderElection(process, rules, clock.now())
        self.caches = WorkerCaches(rules.blocks_max)
        self._assignments = WorkerAssignments()
        self._lists = OpenLists()
        self._fetches: list[FetchOpenList | FetchRunningList] = []
        self._leader_term: LeaderTerm | None = None
        self._reconciliation: Reconciliation | None = None
        self._not_ready_since = clock.now()
        self._stalled: set[Process] = set()
        self._joins = 0
        self._ticked_at = clock.now()
        self._unechoed_s = 0.0
        peers.watch(self._peer_changed)

    @property
    def term(self) -> Term | None:
        """The local term while this process leads."""
        return self._leadership.term

    @property
    def waiting(self) -> int:
        return len(self._leader_term.queue) if self._leader_term else 0

    @property
    def open_requests(self) -> int:
        return len(self._leader_term.ledger) if self._leader_term else 0

    @property
    def failed_requests(self) -> int:
        """Failed requests that their gateways have not closed yet."""
        return len(self._leader_term.failed) if self._leader_term else 0

    def has_request(self, request_id: RequestId) -> bool:
        leader_term = self._leader_term
        return leader_term is not None and leader_term.ledger.find(request_id) is not None

    def capacities(self) -> dict[InstanceId, int]:
        """How many more requests each worker can take."""
        if self._leader_term is None:
            return {}
        return {
            peer.process.instance: self._leader_term.ledger.capacity(peer.process).free_slots(
                peer.heartbeat.worker, self._rules.look_ahead
            )
            for peer in self._peers.accepting_work(Role.WORKER)
            if peer.heartbeat.worker is not None
        }

    def submit(self, request: SubmitRequest) -> SubmitAccepted:
        self._observe_attempts([request.attempt_floor])
        return self._require_leader_term().submit(request)

    def adopt(self, message: AdoptRequest) -> RequestAdopted:
        return self._require_leader_term().adopt_request(message)

    def cancel(self, request: CancelRequest) -> CancelAccepted:
        leader_term = self._require_leader_term()
        accepted = leader_term.cancel(request)
        leader_term.bind_waiting()
        return accepted

    def on_open_list(self, message: OpenList | OpenListState) -> bool:
        """Apply what a gateway says of its open list. Returns False if that has expired."""
        if self._peers.is_expired(message.not_after_unix_ms, message.owner):
            return False
        if message.model != self._model or not self._peers.is_alive(message.owner):
            return True
        if (change := self._lists.apply(message, self._clock.now())) is not None:
            if change.torn:
                self._fetches.append(FetchOpenList(gateway=message.owner))
            self._observe_attempts(line.attempt for line in change.opened)
            if self._reconciliation is not None:
                self._reconciliation.on_open_list(change)
        return True

    def on_running_list(self, message: RunningList) -> None:
        """Apply the changes of a worker's running list, which belong to a heartbeat of it."""
        worker = message.worker
        peer = self._peers.find(worker.instance)
        if peer is None or peer.process != worker or peer.heartbeat.model != self._model:
            return
        report = self._assignments.apply_list(message, self._clock.now())
        if report is not None and report.beat.worker is not None:
            self._on_worker_report(peer, report.beat.worker, report)

    def on_sealed(self, call: SealCall, answer: AttemptsSealed | None) -> None:
        """Apply a detokenizer's reply; None if it gave none: it is asked again."""
        if answer is None:
            return
        self._observe_attempts(sealed.attempt for sealed in answer.requests)
        if (leader_term := self._leader_term) is not None:
            leader_term.migration.on_sealed(call, answer)
            leader_term.bind_waiting()

    def tick(self, *, link_up: bool, joins: int) -> None:
        """Do the time-dependent work, several times a heartbeat; `joins`: `Link.connect_count`."""
        now = self._clock.now()
        since_s, self._ticked_at = now - self._ticked_at, now
        if joins != self._joins or not link_up:
            self._joins = joins
            self._leadership.reset_timeout(now)
            self._clear_ready()
        if not link_up:
            self._unechoed_s = 0.0
            return
        self.caches.expire(now)
        self._check_echo(now, since_s)
        if not self._unechoed_s and self._leadership.claim(now):
            self._start_leader_term()
        self._update_ready()
        if self._reconciliation is not None:
            self._reconciliation.tick()

    def start_over(self) -> float | None:
        """Drop a term whose state cannot be trusted: gateways submit again to the next one.

        Returns how long this scheduler claims no new term; None if such a pause is running already.
        """
        pause_s = self._leadership.abandon_term(self._clock.now())
        self._check_term()
        return pause_s

    def resign(self) -> None:
        """Stop leading for good."""
        self._leadership.resign()
        self._check_term()

    def take_actions(self) -> list[Action]:
        fetches, self._fetches = self._fetches, []
        fetches += self._assignments.take_fetches()
        return [*fetches, *(self._leader_term.outbox.take_actions() if self._leader_term else ())]

    def _require_leader_term(self) -> LeaderTerm:
        if self._leader_term is not None:
            return self._leader_term
        raise _not_leader_error(self._leadership.highest)

    def _peer_changed(self, change: PeerChange, peer: Peer) -> None:
        if peer.heartbeat.model not in (None, self._model):
            return
        if change is PeerChange.DIED:
            self._peer_died(peer)
        elif peer.heartbeat.role is Role.SCHEDULER:
            self._on_scheduler_heartbeat(peer)
        elif peer.heartbeat.role is Role.WORKER:
            if change is PeerChange.APPEARED and self._leader_term is not None:
                self._leader_term.on_worker_returned(peer.process)
            self._on_worker_heartbeat(peer)
        elif peer.heartbeat.role is Role.DETOKENIZER and self._reconciliation is not None:
            self._reconciliation.on_detokenizer_heartbeat(peer.process)

    def _on_scheduler_heartbeat(self, peer: Peer) -> None:
        claims = self._peers.claims(self._model)
        refused = not self._leadership.observe_claims(claims)
        if refused and peer.heartbeat.leads == leading_term(claims):
            # The claim is too far above the earlier terms.
            self._peers.reject_heartbeat(peer.heartbeat, "leads")
        self._check_term()

    def _on_worker_heartbeat(self, peer: Peer) -> None:
        load = peer.heartbeat.worker
        if load is None:
            return
        report = self._assignments.apply(peer.heartbeat, load, self._clock.now())
        self.caches.on_heartbeat(peer.process, load.kv_seq)
        if load.term is not None:
            if not self._leadership.observe_term(load.term):
                self._peers.reject_heartbeat(peer.heartbeat, "worker.term")
            self._check_term()
        self._note_stall(peer.process, is_stalled=stalled(load, self._rules.stall_s))
        if report is not None:
            self._on_worker_report(peer, load, report)

    def _on_worker_report(self, peer: Peer, load: WorkerLoad, report: WorkerReport) -> None:
        self._observe_attempts(report.held.values())
        self._update_ready()
        if self._reconciliation is not None:
            self._reconciliation.on_worker_report(peer, load, report)

    def _observe_attempts(self, attempts: Iterable[Attempt | None]) -> None:
        """Give up a term that is lower than that of an attempt: a higher one is claimed next.

        Attempts are ordered by their terms, so what this term bound would be refused wherever this
        attempt is known. It is of a term that no live scheduler and no worker has named.
        """
        term = self._leadership.term
        latest = max((each.term for each in attempts if each is not None), default=None)
        if term is not None and latest is not None and latest > term:
            self._leadership.observe_term(latest)
            self._check_term()

    def _peer_died(self, peer: Peer) -> None:
        process = peer.process
        reconciliation = self._reconciliation
        match peer.heartbeat.role:
            case Role.SCHEDULER:
                self._on_scheduler_heartbeat(peer)
            case Role.GATEWAY:
                self._lists.forget(process)
            case Role.WORKER:
                self.caches.forget(process)
                self._assignments.forget(process)
                self._stalled.discard(process)
                if reconciliation is not None:
                    exited = peer.liveness is Liveness.EXITED
                    reconciliation.on_worker_died(process, exited=exited)
            case Role.DETOKENIZER:
                if reconciliation is not None:
                    reconciliation.on_detokenizer_died(process)
            case _:
                pass

    def _start_leader_term(self) -> None:
        term = self._leadership.term
        assert term is not None
        log.info("scheduler leads", extra={"term": term.number})
        self._leader_term = LeaderTerm(
            term, self._model, self._rules, self._clock, self._peers, self._assignments, self.caches
        )
        self._reconciliation = Reconciliation(self._leader_term, self._lists)
        self._not_ready_since = self._clock.now()

    def _check_term(self) -> None:
        """Drop all state if the term is over: gateways submit again to the next leader."""
        if self._leader_term is None or self._leadership.term is not None:
            return
        log.warning(
            "scheduler steps down",
            extra={"term": self._leader_term.term.number, "waiting": len(self._leader_term.queue)},
        )
        self._leader_term = None
        self._reconciliation = None

    def _check_echo(self, now: float, since_s: float) -> None:
        """Make way if nothing reaches this leader: its heartbeats do, so that no standby claims.

        A tick counts for one heartbeat at most: nothing reaches a process while it is frozen.
        """
        if self._peers.is_echoed:
            self._unechoed_s = 0.0
            return
        self._leadership.reset_timeout(now)  # it cannot know who leads
        self._unechoed_s += min(since_s, self._rules.beat_s)
        silent = self._unechoed_s >= self._rules.beats(UNECHOED_BEATS)
        if silent and self._leader_term is not None and self._has_standby():
            self._leadership.make_way()
            self._check_term()

    def _has_standby(self) -> bool:
        standbys = self._peers.accepting_work(Role.SCHEDULER)
        return any(peer.heartbeat.model == self._model for peer in standbys)

    def _update_ready(self) -> None:
        """Allow binds and aborts once all gateways and workers have reported, or had time to."""
        if self._leader_term is None or self._leader_term.ready:
            return
        waited_s = self._clock.now() - self._not_ready_since
        if waited_s >= self._rules.beats(READY_TIMEOUT_BEATS) or self._all_reported():
            self._leader_term.ready = True
            self._leader_term.bind_waiting()

    def _all_reported(self) -> bool:
        gateways = [peer.process for peer in self._peers.with_role(Role.GATEWAY)]
        workers = [peer.process for peer in self._peers.with_role(Role.WORKER)]
        since = self._not_ready_since
        return (
            bool(gateways and workers)
            and all(self._lists.complete_since(gateway, since) for gateway in gateways)
            and all(self._assignments.reported_since(worker, since) for worker in workers)
        )

    def _clear_ready(self) -> None:
        self._not_ready_since = self._clock.now()
        if self._leader_term is not None:
            self._leader_term.clear_ready()

    def _note_stall(self, worker: Process, *, is_stalled: bool) -> None:
        if is_stalled and worker not in self._stalled:
            log.warning("worker stalled", extra={"worker": worker.instance})
            self._stalled.add(worker)
        elif not is_stalled:
            self._stalled.discard(worker)


def _not_leader_error(term: Term | None) -> EngineError:
    if term is None:
        return Unavailable("no scheduler leads yet", retry_after_s=1.0)
    return WrongTerm(
        "another scheduler leads",
        details={"term": str(term.number), "scheduler": term.scheduler.instance},
    )
