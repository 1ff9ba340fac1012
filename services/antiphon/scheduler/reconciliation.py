"""Reconciles three views: the leader's bindings, the workers' reports and the open lists.

| a request that is                  | is then                                                     |
|------------------------------------|-------------------------------------------------------------|
| open, unknown, running             | adopted                                                     |
| open, unknown, not running         | requested from its gateway; lost if text of it was shown    |
| running, not open                  | aborted after a grace period                                |
| accepted, not open                 | dropped after a grace period                                |
| bound, not running                 | admitted again, as the same attempt                         |
| bound, requeued by its worker      | placed again, as another attempt                            |
| bound, its worker refuses commands | placed again, as another attempt                            |
| running twice                      | kept as the attempt that its gateway shows, else the latest |
| ended by its gateway               | forgotten, and aborted where it still runs                  |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.scheduler.cluster_view import HeldAttempt, WorkerReport
from antiphon.scheduler.leader_config import (
    ADOPTION_BEATS,
    ATTEMPT_TIMEOUT_BEATS,
    FREE_AFTER_MS,
    GRACE_BEATS,
    UNHELD_BEATS,
)
from antiphon.scheduler.request_table import RequestEntry
from antiphon.wire.base import Attempt, Process, ProcessState, Role
from antiphon.wire.errors import WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from antiphon.scheduler.leader_term import LeaderTerm
    from antiphon.scheduler.outbox import FailedRequest
    from antiphon.service.followed_lists import OpenChange, OpenLists
    from antiphon.service.peers import Peer
    from antiphon.wire.heartbeat import RunningRequest, WorkerLoad
    from antiphon.wire.ids import RequestId
    from antiphon.wire.submit import OpenRequest


class Reconciliation:
    """Updates a leader term from reports and lists. Aborts nothing before the term is ready."""

    def __init__(self, leader_term: LeaderTerm, lists: OpenLists) -> None:
        self._leader_term = leader_term
        self._ledger = leader_term.ledger
        self._rules = leader_term.rules
        self._clock = leader_term.clock
        self._peers = leader_term.peers
        self._assignments = leader_term.assignments
        self._lists = lists
        self._unowned_since: dict[Process, dict[RequestId, float]] = {}
        # Since when the complete lists of its gateway are without a request.
        self._unlisted: dict[Process, dict[RequestId, float]] = {}
        self._dead_detokenizers: dict[Process, float] = {}  # since when requests wait for them
        self._dead_owners: dict[Process, float] = {}  # of requests, and since when they are dead
        self._resent_at = self._clock.now()

    def on_worker_report(self, peer: Peer, load: WorkerLoad, report: WorkerReport) -> None:
        worker, held = peer.process, report.held
        unowned = self._unowned_since.get(worker, {})
        self._unowned_since[worker] = {}
        for request_id, attempt in held.items():
            detokenizer = report.detokenizers[request_id]
            self._reconcile_held(request_id, HeldAttempt(attempt, worker, detokenizer), unowned)
        for entry in self._ledger.bound_to(worker):
            assert entry.binding is not None
            if held.get(entry.request_id) == entry.binding.attempt:
                if entry.request_id not in report.ended:
                    entry.seen_at = self._clock.now()
            elif self._leader_term.ready:
                self._miss(entry, peer, held.get(entry.request_id))
        if (cleared := self._ledger.capacity(worker).report(report.lines)) is not None:
            self._leader_term.clear(cleared)
        if load.refused is not None and load.refused.leader == self._leader_term.term:
            self._requeue_refused(worker, held)
        for line in report.lines:
            if line.returned:
                self._requeue_returned(line, worker)
        if load.hands_back and self._leader_term.ready:
            self._leader_term.hand_back(worker, held.keys() - report.ended)
        self._leader_term.bind_waiting()

    def on_open_list(self, change: OpenChange) -> None:
        for request_id in change.closed:
            self._close(request_id, change.source)
        if change.lines is not None:
            self._compare(change.source, change.lines)
        else:
            for line in change.opened:
                self._line(change.source, line)
        self._leader_term.bind_waiting()

    def on_worker_died(self, worker: Process, *, exited: bool) -> None:
        self._unowned_since.pop(worker, None)
        self._leader_term.on_worker_died(worker, exited=exited)

    def on_detokenizer_died(self, detokenizer: Process) -> None:
        self._leader_term.migration.on_detokenizer_died(detokenizer)

    def on_detokenizer_heartbeat(self, detokenizer: Process) -> None:
        """It may return in time: workers send everything again."""
        self._dead_detokenizers.pop(detokenizer, None)

    def tick(self) -> None:
        """Do the time-dependent work: deadlines, and waits that have lasted too long.

        Waiting requests are not visited here: 2,000 of them are scattered over memory, and ten
        times a second that took 3 % of a core.
        """
        now, unix_ms = self._clock.now(), self._clock.unix_ms()
        beat = now - self._resent_at >= self._rules.beat_s
        self._end_due(unix_ms)
        self._end_orphans(now)
        self._leader_term.migration.rebind_orphans()
        self._leader_term.end_isolated()
        if self._leader_term.ready:  # before that, a request that seems to wait may be running
            self._end_waits(now, beat=beat)
        self._leader_term.tombstones.expire(unix_ms)
        self._drop_failed(
            lambda failed: (
                unix_ms >= failed.deadline_unix_ms + FREE_AFTER_MS
                or not self._peers.is_alive(failed.owner)
            )
        )
        if beat:
            self._resent_at = now
            for failed in self._leader_term.failed.values():
                self._leader_term.outbox.notice(failed)
        self._leader_term.bind_waiting()

    def _end_due(self, unix_ms: int) -> None:
        waiting = self._leader_term.queue.request_ids
        for entry in self._ledger.take_due(unix_ms):
            if entry.request_id in waiting or unix_ms >= entry.deadline_unix_ms + FREE_AFTER_MS:
                self._leader_term.drop(entry)

    def _end_orphans(self, now: float) -> None:
        dead = [owner for owner in self._ledger.owners() if not self._peers.is_alive(owner)]
        self._dead_owners = {owner: self._dead_owners.get(owner, now) for owner in dead}
        for owner, since in self._dead_owners.items():
            self._unlisted.pop(owner, None)
            for entry in list(self._ledger.owned(owner).values()):
                resume_ms = 0 if entry.submit is None else entry.submit.resume_ms
                if now - since < resume_ms / 1000:
                    continue  # another gateway may adopt it
                # A submit may arrive before its gateway's first heartbeat, and after the last.
                if now - entry.since >= self._rules.beats(GRACE_BEATS):
                    self._leader_term.drop(entry)

    def _end_waits(self, now: float, *, beat: bool) -> None:
        waiting, bound = self._leader_term.queue.request_ids, self._ledger.bound()
        timeout_s = self._rules.queue_timeout_s
        if beat and timeout_s is not None:
            for entry in self._ledger.entries():
                if entry.request_id in waiting and now - entry.queued_at >= timeout_s:
                    self._leader_term.expire(entry, timeout_s)
        # More entries than waiting and bound ones: some are followed and run nowhere.
        if len(self._ledger) > len(waiting) + len(bound):
            bound = [each for each in self._ledger.entries() if each.request_id not in waiting]
        for entry in bound:
            self._check_age(entry)

    def _reconcile_held(
        self, request_id: RequestId, held: HeldAttempt, unowned: dict[RequestId, float]
    ) -> None:
        entry = self._ledger.find(request_id)
        if self._leader_term.has_ended(request_id):
            self._abort(request_id, held)
        elif entry is None:
            self._reconcile_unknown_held(request_id, held, unowned)
        elif entry.is_sealed(held.attempt):
            self._abort(request_id, held)
        elif entry.binding is None:
            if entry.followed in (None, held.attempt):
                self._leader_term.adopt(entry, held)
            else:
                self._abort(request_id, held)
        elif held.worker == entry.binding.worker:
            pass  # the bound attempt, or one that the worker is about to replace
        elif held.attempt == entry.followed:
            self._leader_term.adopt(entry, held)
        elif held.attempt < entry.binding.attempt:
            self._abort(request_id, held)

    def _requeue_returned(self, line: RunningRequest, worker: Process) -> None:
        """Place a requeued request again. Its worker reports it until the attempt is aborted."""
        entry = self._ledger.find(line.request_id)
        binding = None if entry is None else entry.binding
        if entry is None and not self._leader_term.has_ended(line.request_id):
            return  # of an earlier leader: its gateway submits it again or no longer lists it
        if entry is None or binding is None or binding.attempt != line.attempt:
            self._abort(line.request_id, HeldAttempt(line.attempt, worker))
        elif entry.restartable and self._leader_term.ready:
            self._leader_term.requeue(entry, worker)

    def _requeue_refused(self, worker: Process, held: Mapping[RequestId, Attempt]) -> None:
        """Move requests off a worker that refuses the leader's commands; it gets no new ones.

        The worker reports the refusal for some seconds; afterwards it is tried again.
        """
        if self._leader_term.ready:
            for entry in self._ledger.bound_to(worker):
                if entry.restartable and entry.request_id not in held:
                    self._leader_term.requeue(entry, worker)
        self._ledger.capacity(worker).suspended = True

    def _reconcile_unknown_held(
        self, request_id: RequestId, held: HeldAttempt, unowned: dict[RequestId, float]
    ) -> None:
        if (found := self._lists.find(request_id)) is not None:
            self._line(*found)
            return
        since = unowned.get(request_id, self._clock.now())
        self._unowned_since[held.worker][request_id] = since
        if self._clock.now() - since >= self._rules.beats(GRACE_BEATS):
            self._abort(request_id, held)

    def _miss(self, entry: RequestEntry, peer: Peer, held: Attempt | None) -> None:
        """Handle a bound request that its worker lacks: the admit was lost, or it ended.

        `held` is another attempt of it at this worker.
        """
        binding = entry.binding
        assert binding is not None
        if self._clock.now() - binding.admitted_at < self._rules.beats(GRACE_BEATS):
            return
        if binding.rebound:
            if held in binding.continues:
                self._leader_term.admit(entry, held)
            elif held is None:
                error = WorkerLost("the worker has lost the request")
                self._leader_term.fail_attempt(entry, error)
            return
        if not entry.restartable:
            return  # it has run, so it ended; `_check_age` decides
        if binding.detokenizer is None or peer.heartbeat.state is not ProcessState.READY:
            self._leader_term.restart(entry)
        else:
            self._leader_term.admit(entry)

    def _check_age(self, entry: RequestEntry) -> None:
        """Fail an attempt that no worker runs or no detokenizer decodes for too long."""
        now = self._clock.now()
        if entry.sealing is not None:
            self._leader_term.migration.check(entry)
            return
        if entry.binding is None and entry.sealed is not None and entry.sealed.ended:
            return  # its gateway is about to close it
        silent_since, binding = now, entry.binding
        detokenizer = None if binding is None else binding.detokenizer
        if detokenizer is not None and not self._peers.is_alive(detokenizer):
            silent_since = self._dead_detokenizers.setdefault(detokenizer, now)
            if now - silent_since >= self._rules.beats(GRACE_BEATS):
                # It died before this leader knew of the request.
                self._leader_term.migration.add_orphan(entry)
        give_up_s = self._rules.beats(ATTEMPT_TIMEOUT_BEATS)
        unheld = binding is None and self._is_unheld(entry, now)
        if unheld or now - entry.seen_at >= give_up_s:
            self._leader_term.fail_attempt(entry, WorkerLost("no worker runs the request any more"))
        elif now - silent_since >= give_up_s:
            self._leader_term.fail_attempt(
                entry, WorkerLost("the detokenizer of the request has died")
            )

    def _is_unheld(self, entry: RequestEntry, now: float) -> bool:
        """Whether no worker runs a request of another leader, or of a gateway that was dead.

        All live ones have reported without it since it became known, not only in a report that was
        under way then. One that is silent counts until it is dead.
        """
        waited_s = now - entry.seen_at
        if waited_s < self._rules.beats(UNHELD_BEATS):
            return False
        since = entry.seen_at + self._rules.beats(UNHELD_BEATS - 1)
        return waited_s >= self._rules.beats(self._rules.dead_beats + 1) or all(
            self._assignments.reported_since(peer.process, since)
            for peer in self._peers.with_role(Role.WORKER)
            if peer.heartbeat.model == self._leader_term.model and peer.heartbeat.worker is not None
        )

    def _compare(self, owner: Process, requests: Mapping[RequestId, OpenRequest]) -> None:
        """Compare all open requests of a gateway with those that are known of it.

        Known waiting requests, perhaps 20,000, are covered by the set operations alone.
        """
        unknown = requests.keys() - self._ledger.owned(owner).keys()
        lacking = [
            line.request_id
            for line in list(requests.values())
            if line.attempt is not None or line.request_id in unknown
            if not self._line(owner, line)
        ]
        self._drop_unlisted(owner, requests.keys())
        # A new leader is sent everything anyway.
        if lacking and self._leader_term.ready:
            self._leader_term.outbox.request_resubmission(owner, lacking)

    def _line(self, owner: Process, line: OpenRequest) -> bool:
        """Apply one entry of an open list. Returns False if the request must be submitted again."""
        if (entry := self._ledger.find(line.request_id)) is None:
            return self._open_unknown(owner, line)
        if entry.owner == owner:
            self._unlisted.get(owner, {}).pop(line.request_id, None)
            entry.adopted_at = None
            if line.attempt is not None:
                self._leader_term.follow(entry, line.attempt)
            return entry.submit is not None
        return True

    def _open_unknown(self, owner: Process, line: OpenRequest) -> bool:
        """Add a request that a worker or its gateway knows an attempt of.

        Returns False if it must be submitted: it can be bound again only then.
        """
        if self._leader_term.has_ended(line.request_id):
            return True
        held = self._assignments.find(line.request_id, line.attempt)
        if held is None and line.attempt is None:
            return False
        now, due_ms = self._clock.now(), self._peers.to_local_ms(line.deadline_unix_ms, owner)
        entry = RequestEntry(line.request_id, owner, due_ms, now, now, followed=line.attempt)
        self._ledger.add(entry)
        if held is not None:
            self._leader_term.adopt(entry, held)
        return False

    def _close(self, request_id: RequestId, owner: Process) -> None:
        """Forget a request that its gateway has ended. Its submit may still be in transit."""
        entry = self._ledger.find(request_id)
        if entry is not None and entry.owner != owner:
            return  # another gateway has adopted it
        if entry is not None:
            self._leader_term.forget(entry)
        self._drop_failed(lambda failed: (failed.owner, failed.request_id) == (owner, request_id))
        until = self._clock.unix_ms() + round(self._rules.tombstone_s * 1000)
        self._leader_term.tombstones.add(request_id, owner, until)

    def _drop_unlisted(self, owner: Process, listed: Collection[RequestId]) -> None:
        owned, before = self._ledger.owned(owner), self._unlisted.pop(owner, {})
        # By time: several lists that were sent before a submit may come at once after it.
        now, grace_s = self._clock.now(), self._rules.beats(GRACE_BEATS)
        # In order of their ids, so that a simulation is reproducible.
        if unlisted := sorted(owned.keys() - set(listed)):
            self._unlisted[owner] = {name: before.get(name, now) for name in unlisted}
        for name, since in self._unlisted.get(owner, {}).items():
            if now - since >= grace_s and not self._is_being_adopted(owned[name]):
                self._leader_term.drop(owned[name])
        self._drop_failed(lambda failed: failed.owner == owner and failed.request_id not in listed)

    def _is_being_adopted(self, entry: RequestEntry) -> bool:
        """Whether its gateway may have to ask for it again before it lists it."""
        if entry.adopted_at is None:
            return False
        return self._clock.now() - entry.adopted_at < self._rules.beats(ADOPTION_BEATS)

    def _drop_failed(self, ended: Callable[[FailedRequest], bool]) -> None:
        for failed in list(self._leader_term.failed.values()):
            if ended(failed):
                del self._leader_term.failed[failed.request_id]

    def _abort(self, request_id: RequestId, held: HeldAttempt) -> None:
        if self._leader_term.ready:
            self._leader_term.abort(request_id, held)
