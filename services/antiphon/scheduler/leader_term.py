"""State of one leader term: accepted requests, their bindings, and the outgoing messages.

A scheduler that steps down drops all of it; gateways submit again to the next leader.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.scheduler.cluster_view import HeldAttempt, WorkerAssignments
from antiphon.scheduler.leader_config import (
    ALONE_STEPS,
    ATTEMPT_TIMEOUT_BEATS,
    DEATHS_MAX,
    GRACE_BEATS,
    MIGRATIONS_MAX,
    LeaderConfig,
)
from antiphon.scheduler.migration import Migration
from antiphon.scheduler.outbox import (
    CommandOutbox,
    FailedRequest,
    RequestBound,
    RequestRemoved,
    RequestRequeued,
    admit_bytes,
    admit_command,
    rebind_command,
)
from antiphon.scheduler.placement import Dispatcher, Placement, PlacementTarget
from antiphon.scheduler.queue import DrainRate, QueuePolicy, SchedulerQueue
from antiphon.scheduler.request_table import (
    Binding,
    RequestEntry,
    RequestTable,
    SchedulerTombstones,
)
from antiphon.wire.base import Attempt, Process, Role, Term
from antiphon.wire.command import Abort
from antiphon.wire.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    GatewayLost,
    InvalidRequest,
    Overloaded,
    RequestQuarantined,
    RequestTooLarge,
    Unavailable,
    UnknownStream,
    WorkerLost,
    decode_error,
    encode_error,
)
from antiphon.wire.submit import (
    AdoptRequest,
    CancelAccepted,
    CancelRequest,
    RequestAdopted,
    SubmitAccepted,
    SubmitRequest,
)

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from antiphon.scheduler.worker_caches import WorkerCaches
    from antiphon.service.clock import Clock
    from antiphon.service.peers import Peer, PeerTable
    from antiphon.wire.ids import ModelName, RequestId

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LeaderTerm:
    """Accepts, binds, aborts and fails requests. Actions collect until `take_actions`."""

    term: Term
    model: ModelName
    rules: LeaderConfig
    clock: Clock
    peers: PeerTable
    assignments: WorkerAssignments
    caches: WorkerCaches

    def __post_init__(self) -> None:
        self._policy = QueuePolicy(self.rules.policy, self.caches.overlaps)
        self.queue = SchedulerQueue(self.rules.precedence.max_overtake_s, self._policy)
        self.ledger = RequestTable()
        self.tombstones = SchedulerTombstones()
        self.failed: dict[RequestId, FailedRequest] = {}
        self.ready = False
        """Whether all processes have had time to report; nothing is bound or aborted before."""
        self._placement = Placement(self.model, self.peers, self.rules, self.caches, self.ledger)
        self._matching = Dispatcher(self.queue, self.ledger, self._placement, self.clock)
        self._rate = DrainRate()
        self.outbox = CommandOutbox(self.term, self.clock, self.rules)
        self.migration = Migration(self)
        self._numbers = itertools.count(1)
        self._isolated: dict[RequestId, float] = {}  # since when no two workers are ready

    def clear_ready(self) -> None:
        """Wait for reports again: the link was down, so missing ones mean nothing."""
        self.ready = False
        for entry in self.ledger.entries():
            entry.wait(self.clock.now())

    def submit(self, request: SubmitRequest) -> SubmitAccepted:
        """Accept a request, or confirm an earlier acceptance.

        Raises:
            EngineError: It has ended already, its id is taken, or the queue is full.
        """
        self._reject_ended(request)
        if (entry := self.ledger.find(request.request_id)) is None:
            self._reject_unknown_gateway(request)
            self._accept(request)
            self.bind_waiting()
        elif entry.owner != request.owner or (
            entry.submit is not None and entry.submit.digest != request.digest
        ):
            raise DuplicateRequest("a live request has this id")
        else:
            before, entry.submit = entry.submit, msgspec.structs.replace(request, sealed=None)
            self.ledger.outputs.add(entry.submit)
            if request.sealed is not None:
                self.migration.on_owner_sealed(entry, request.sealed)
            if request.attempt_floor is not None:
                self.follow(entry, request.attempt_floor)
            if before is not None and before.media != request.media:
                self._send_again(entry)  # with the claims of the gateway that has adopted it
            self.migration.conclude(entry)
            self.bind_waiting()
        return SubmitAccepted(
            request_id=request.request_id,
            term=self.term,
            position=self.queue.position(request.request_id),
        )

    def adopt_request(self, message: AdoptRequest) -> RequestAdopted:
        """Give a request to the gateway at which its client resumes it.

        Raises:
            UnknownStream: There is no such request of this tenant that can be resumed.
            InvalidRequest: The client's request is another one.
            Unavailable: The request is not known yet to this leader, or the gateway is not.
        """
        entry = self.ledger.find(message.request_id)
        if not self.ready if entry is None else entry.submit is None:
            raise Unavailable("the request is not known yet", retry_after_s=0.5)
        submit = None if entry is None else entry.submit
        if entry is None or submit is None or submit.tenant != message.tenant:
            raise UnknownStream("there is no such stream")
        if submit.resume is None:
            raise UnknownStream("the stream was not started with a time to resume it")
        if submit.resume.fingerprint != message.fingerprint:
            raise InvalidRequest("a stream is resumed with the request that it was started with")
        if not self.peers.is_alive(message.owner):
            raise Unavailable("no valid heartbeats from this gateway", retry_after_s=0.5)
        entry.adopted_at = self.clock.now()
        if changed := entry.owner != message.owner:
            self._change_owner(entry, submit, message.owner)
        assert entry.submit is not None
        return RequestAdopted(
            submit=entry.submit, term=self.term, attempt=entry.followed, changed=changed
        )

    def _change_owner(self, entry: RequestEntry, submit: SubmitRequest, owner: Process) -> None:
        """All of its text is sent to the new owner, since the worker sends everything again."""
        binding = entry.binding
        bound = None if binding is None else binding.attempt
        known = [each for each in (entry.followed, entry.sealed_to, bound) if each is not None]
        attempt = entry.moved_from = max(known, default=None)
        lost = encode_error(GatewayLost("the stream was resumed at another gateway"))
        self.outbox.notice(
            FailedRequest(entry.request_id, entry.owner, attempt, lost, entry.deadline_unix_ms)
        )
        self.ledger.change_owner(entry, owner)
        deadline_unix_ms = entry.deadline_unix_ms - (self.peers.offset_ms(owner) or 0)
        entry.submit = msgspec.structs.replace(
            submit,
            owner=owner,
            deadline_unix_ms=deadline_unix_ms,
            attempt_floor=entry.followed,
            sealed=None,
        )
        log.info(
            "request adopted", extra={"request_id": entry.request_id, "gateway": owner.instance}
        )
        if binding is None and entry.sealed is not None and entry.sealed.ended:
            # It runs nowhere, and would not be sent again; unless it waits for that already.
            if entry.restartable and entry.request_id not in self.queue:
                self.restart(entry)
                self.bind_waiting()
            return
        self._send_again(entry)

    def _send_again(self, entry: RequestEntry) -> None:
        """Rebind a request that runs, to the same detokenizer if that lives."""
        binding = entry.binding
        if binding is None or binding.detokenizer is None:
            return
        detokenizer = self.peers.find(binding.detokenizer.instance)
        if detokenizer is None or detokenizer.process != binding.detokenizer:
            detokenizer = self.detokenizer_of(binding.worker)
        if detokenizer is not None:  # else it is bound to another one as soon as there is one
            self.rebind(entry, detokenizer)

    def has_ended(self, request_id: RequestId) -> bool:
        return request_id in self.tombstones or request_id in self.failed

    def cancel(self, request: CancelRequest) -> CancelAccepted:
        """Free a request wherever it is, and keep a late submit of it from running."""
        entry = self.ledger.find(request.request_id)
        if entry is None or entry.owner == request.owner:
            due_ms = self.peers.to_local_ms(request.deadline_unix_ms, request.owner)
            until = due_ms + round(self.rules.tombstone_s * 1000)
            self.tombstones.add(request.request_id, request.owner, until)
            self.failed.pop(request.request_id, None)
        if entry is not None and entry.owner == request.owner:
            self.drop(entry)
        return CancelAccepted(request_id=request.request_id)

    def _reject_unknown_gateway(self, request: SubmitRequest) -> None:
        """Reject a gateway without valid heartbeats: it is new, or has other settings.

        No live gateway would list its requests as open, so they would be dropped while they run.
        """
        if not self.peers.is_alive(request.owner):
            raise Unavailable(
                "the scheduler receives no valid heartbeats from this gateway", retry_after_s=0.5
            )

    def detokenizer_of(self, worker: Process) -> Peer | None:
        """The detokenizer of a worker, if any is ready."""
        return self._placement.detokenizer_of(worker.instance)

    def bind_waiting(self) -> None:
        while self.ready and (match := self._matching.next()) is not None:
            if match.place is not None:
                self._bind(match.entry, match.submit, match.place)
            elif match.error is not None:
                self.fail(match.entry, match.error)
            else:
                self.drop(match.entry)

    def adopt(self, entry: RequestEntry, held: HeldAttempt) -> None:
        """Accept the binding that a worker reports, and abort the attempt bound elsewhere."""
        self.leave(entry)
        self.queue.remove(entry.request_id)
        binding = Binding(held.attempt, held.worker, held.detokenizer, self.clock.now())
        self.ledger.bind(entry, binding)

    def follow(self, entry: RequestEntry, attempt: Attempt) -> None:
        """Accept the attempt that the gateway shows. No other attempt can serve it from now on."""
        now = self.clock.now()
        entry.followed = attempt
        if entry.request_id in self.queue and not entry.continues(attempt):
            self.queue.remove(entry.request_id)
            entry.seen_at = now
        if entry.sealing is not None and entry.sealing.attempt < attempt:
            self.migration.begin(entry)
        binding = entry.binding
        if binding is None or attempt in (binding.attempt, *binding.continues):
            entry.disputed_at = None
            return
        if (held := self.assignments.find(entry.request_id, attempt)) is not None:
            self.adopt(entry, held)
        elif entry.disputed_at is None:
            entry.disputed_at = now
        elif now - entry.disputed_at >= self.rules.beats(GRACE_BEATS):
            self.fail_attempt(entry, WorkerLost("the answer that was being read is lost"))

    def admit(self, entry: RequestEntry, held: Attempt | None = None) -> None:
        """Send a bound request to its worker, which has `held`. Repeating it changes nothing there.

        A rebind is of the attempt before, unless the worker has reported an earlier one.
        """
        binding = entry.binding
        assert binding is not None
        binding.admitted_at = now = self.clock.now()
        if binding.rebound:
            command = rebind_command(entry, held or binding.continues[-1])
        else:
            command = admit_command(entry, now)
        self.outbox.command(binding.worker, command)

    def rebind(self, entry: RequestEntry, detokenizer: Peer) -> None:
        """Let a detokenizer read all of a request, which goes on as it is at its worker."""
        old = entry.binding
        assert old is not None
        attempt = Attempt(term=self.term, n=next(self._numbers))
        binding = Binding(
            attempt,
            old.worker,
            detokenizer.process,
            self.clock.now(),
            detokenizer.heartbeat.reads,
            (*old.continues, old.attempt),
            rebound=True,
        )
        self.ledger.bind(entry, binding)
        self.admit(entry)

    def abort(self, request_id: RequestId, held: HeldAttempt) -> None:
        """Send an abort of an attempt to its worker. The attempt takes a slot until applied."""
        self.ledger.capacity(held.worker).orphans.add(request_id)
        self.outbox.command(held.worker, Abort(request_id=request_id, attempt=held.attempt))

    def restart(self, entry: RequestEntry) -> None:
        """Put a request back at its old queue position: it restarts as a new attempt."""
        assert entry.restartable
        self.leave(entry)
        entry.seen_at = self.clock.now()
        self._queue(entry)

    def expire(self, entry: RequestEntry, timeout_s: float) -> None:
        """Fail a request that has waited for `timeout_s`."""
        retry_after_s = self._rate.retry_after_s(len(self.queue), self.clock.now())
        self.fail(entry, Overloaded.late(timeout_s=timeout_s, retry_after_s=retry_after_s))

    def requeue(self, entry: RequestEntry, worker: Process) -> None:
        """Requeue a request that a worker returned unstarted: another one gets it, if any can."""
        entry.requeued_by.add(worker)
        self.ledger.capacity(worker).suspended = True
        self.outbox.add_action(RequestRequeued(entry.request_id, worker))
        self.restart(entry)

    def drop(self, entry: RequestEntry) -> None:
        """Free a request that is not wanted any more, and abort it where it runs."""
        self.leave(entry)
        self.forget(entry)

    def forget(self, entry: RequestEntry) -> None:
        """Free a request that has ended; its worker knows that already."""
        self.queue.remove(entry.request_id)
        self.ledger.remove(entry)
        self.outbox.add_action(RequestRemoved(entry.request_id))

    def fail(self, entry: RequestEntry, error: EngineError) -> None:
        """End a request that cannot continue: notices go to its gateway until it has closed it."""
        bound = entry.binding.attempt if entry.binding else None
        # The latest one that its gateway may follow, which it does not have to have listed yet.
        known = [each for each in (entry.followed, entry.sealed_to, bound) if each is not None]
        attempt = max(known, default=None)
        log.warning(
            "request lost",
            extra={"request_id": entry.request_id, "code": error.code, "reason": error.message},
        )
        self.failed[entry.request_id] = failed = FailedRequest(
            entry.request_id, entry.owner, attempt, encode_error(error), entry.deadline_unix_ms
        )
        self.outbox.notice(failed)
        self.drop(entry)

    def fail_attempt(self, entry: RequestEntry, error: EngineError) -> None:
        """Continue a request after a failed attempt; fail it after some of them."""
        entry.migrations += 1
        entry.queued_at = self.clock.now()  # it may have been started, so the wait begins anew
        if entry.migrations <= MIGRATIONS_MAX:
            self.migration.begin(entry)
        else:
            self.fail(entry, error)

    def on_worker_died(self, worker: Process, *, exited: bool) -> None:
        """Continue the requests of a dead worker.

        One that was there when the worker is known to have ended may be why, also one that waited
        by the last report: it may have begun since. A silent worker may be cut off.
        """
        self.outbox.forget(worker)
        for entry in self.ledger.bound_to(worker):
            if exited:
                entry.deaths.add(worker)
            if len(entry.deaths) > DEATHS_MAX:
                text = f"{len(entry.deaths)} workers died while they computed this request"
                self.fail(entry, RequestQuarantined(text))
                continue
            if entry.isolated:
                self._isolated.setdefault(entry.request_id, self.clock.now())
            self.fail_attempt(entry, WorkerLost("the worker that ran the request has died"))
        self.ledger.close(worker)
        self.bind_waiting()

    def on_worker_returned(self, worker: Process) -> None:
        """Take back the death of a worker that had only lost its connection."""
        for entry in self.ledger.entries():
            entry.deaths.discard(worker)

    def clear(self, request_id: RequestId) -> None:
        """Suspect a request no more, whose worker lives on after it has begun there alone."""
        if (entry := self.ledger.find(request_id)) is not None:
            entry.deaths.clear()

    def hand_back(self, worker: Process, running: AbstractSet[RequestId]) -> None:
        """Continue what a worker runs on others, if one is ready; that counts as no failure."""
        if not self._placement.has_ready_worker:
            return
        for entry in self.ledger.bound_to(worker):
            if entry.request_id in running and entry.submit is not None:
                entry.queued_at = self.clock.now()
                self.migration.begin(entry)

    def end_isolated(self) -> None:
        """End requests that must begin alone while only one worker is ready: they may kill it."""
        now, possible = self.clock.now(), self._placement.can_isolate
        for request_id, since in list(self._isolated.items()):
            entry = self.ledger.find(request_id)
            if entry is None or not entry.isolated:
                del self._isolated[request_id]
            elif possible or entry.binding is not None:
                self._isolated[request_id] = now
            elif now - since >= self.rules.beats(ATTEMPT_TIMEOUT_BEATS):
                text = f"{len(entry.deaths)} workers died while they computed this request"
                self.fail(entry, RequestQuarantined(f"{text}, and only one is ready"))

    def _reject_ended(self, request: SubmitRequest) -> None:
        due_ms = self.peers.to_local_ms(request.deadline_unix_ms, request.owner)
        if due_ms <= self.clock.unix_ms():
            raise DeadlineExceeded("the request's deadline has passed")
        if self.tombstones.was_ended_by(request.request_id, request.owner):
            raise Cancelled("the request was cancelled")
        failed = self.failed.get(request.request_id)
        if failed is not None and failed.owner == request.owner:
            raise decode_error(failed.error)

    def _accept(self, request: SubmitRequest) -> None:
        held = self.assignments.find(request.request_id, request.attempt_floor)
        sealed = request.sealed
        if held is not None and sealed is not None and held.attempt <= sealed.sealed_to:
            held = None
        if held is None and sealed is None and request.attempt_floor is None:
            self._reject_overload(request)
        due_ms = self.peers.to_local_ms(request.deadline_unix_ms, request.owner)
        submit = msgspec.structs.replace(request, sealed=None)
        entry = RequestEntry.of(submit, self.clock.now(), due_ms)
        self.ledger.add(entry)
        if held is not None:
            self.adopt(entry, held)
        elif sealed is not None:
            self.migration.on_owner_sealed(entry, sealed)
        elif entry.restartable:
            self._queue(entry)

    def _queue(self, entry: RequestEntry) -> None:
        assert entry.submit is not None
        rank = self.rules.precedence.rank(entry.submit.priority)
        if entry.policy_key is None:
            entry.policy_key = self._policy.static_key(entry.submit)
        key = (rank, entry.policy_key, entry.came_at, entry.number)
        self.queue.put(entry.request_id, key, entry.submit.block_digests)

    def _reject_overload(self, request: SubmitRequest) -> None:
        bytes_max = self.rules.payload_bytes_max
        size_bytes = admit_bytes(
            request.prompt_ids, request.stop.texts, request.sampling, media=len(request.media)
        )
        if size_bytes > bytes_max:
            raise RequestTooLarge.of(size_bytes=size_bytes, bytes_max=bytes_max)
        self._reject_large_output(request)
        waiting = self._waiting()
        if waiting >= self.rules.queue_max:
            raise Overloaded(
                f"the queue is full: {waiting} requests wait, at most "
                f"{self.rules.queue_max} may (scheduler.queue_max)",
                retry_after_s=self._rate.retry_after_s(waiting, self.clock.now()),
            )

    def _reject_large_output(self, request: SubmitRequest) -> None:
        """Reject a request if the output of all might become more than detokenizers may hold."""
        outputs, new, rules = self.ledger.outputs, request.output_bytes, self.rules
        peers = self.peers.with_role(Role.DETOKENIZER)
        detokenizers = sum(peer.heartbeat.model == self.model for peer in peers)
        of_all, of_tenant = rules.output_bytes_max, rules.tenant_output_bytes_max
        if (taken := outputs.of(request.tenant)) + new > of_tenant:
            limit = f"{of_tenant} bytes (scheduler.tenant_output_bytes_max)"
            whose = "this tenant"
        elif (taken := outputs.total) + new > max(1, detokenizers) * of_all:
            limit = f"{of_all} bytes for each detokenizer (detokenizer.output_bytes_max)"
            whose = "all tenants"
        else:
            return
        advice = "request fewer tokens, choices or logprobs"
        if new > min(of_all, of_tenant):
            text = f"the output of this request may take {new} bytes; the limit is {limit}"
            raise InvalidRequest(f"{text}: {advice}")
        raise Overloaded(
            f"the output of this request may take {new} bytes beside {taken} bytes of the open "
            f"requests of {whose}; the limit is {limit}: {advice}, or try again later",
            retry_after_s=self._rate.retry_after_s(len(self.queue), self.clock.now()),
        )

    def _waiting(self) -> int:
        """Count the requests that no worker runs: in the queue, and bound ahead of a free slot."""
        if len(self.ledger) < self.rules.queue_max:
            return len(self.queue)  # all requests together would not fill it
        return len(self.queue) + self._placement.queued()

    def _bind(self, entry: RequestEntry, submit: SubmitRequest, place: PlacementTarget) -> None:
        now = self.clock.now()
        self.queue.start(entry.request_id, now)
        attempt = Attempt(term=self.term, n=next(self._numbers))
        detokenizer, reads = self.migration.detokenizer(entry, place)
        earlier = entry.sealed.attempts if entry.sealed else ()
        binding = Binding(attempt, place.worker, detokenizer, now, reads, earlier)
        self.ledger.bind(entry, binding, place.charge)
        if entry.isolated:
            until = entry.tokens + ALONE_STEPS * submit.choices
            self.ledger.capacity(place.worker).alone = (entry.request_id, until)
        self.caches.expect(place.worker, submit.block_digests, now)
        self._rate.record(now)
        cached, waited_s = place.cached_blocks, now - entry.since
        blocks = cached + place.charge.blocks
        self.outbox.add_action(
            RequestBound(entry.request_id, attempt, place.worker, waited_s, blocks, cached)
        )
        self.admit(entry)

    def leave(self, entry: RequestEntry) -> None:
        """Unbind and abort what may run there: an admit in transit is in no report yet."""
        binding = entry.binding
        self.ledger.unbind(entry)
        if binding is not None and self.peers.is_alive(binding.worker):
            self.abort(entry.request_id, HeldAttempt(binding.attempt, binding.worker))
