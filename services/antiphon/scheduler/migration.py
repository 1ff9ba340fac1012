"""Continues requests whose attempt has failed: their output is sealed, then they are bound again.

The detokenizer of an attempt fixes its output. Once it has sealed the attempt it accepts no more
tokens of it, so that a worker which wakes up later changes nothing, and the next attempt continues
from what was accepted. A seal that is answered twice, or to two leaders, gives the same output.
Where no detokenizer has the output, its owner seals what it has delivered, which is less or equal.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from antiphon.scheduler.leader_config import ATTEMPT_TIMEOUT_BEATS, SEAL_TIMEOUT_BEATS
from antiphon.scheduler.outbox import SealCall, continuation_bytes
from antiphon.scheduler.request_table import RequestEntry, SealedOutput, Sealing
from antiphon.wire.base import Role
from antiphon.wire.errors import WorkerLost
from antiphon.wire.seal import DETAILS_BYTES_MAX, AttemptsSealed, SealedRequest, SealRequest

if TYPE_CHECKING:
    from antiphon.scheduler.cluster_view import WorkerAssignments
    from antiphon.scheduler.leader_config import LeaderConfig
    from antiphon.scheduler.outbox import CommandOutbox
    from antiphon.scheduler.placement import PlacementTarget
    from antiphon.scheduler.queue import SchedulerQueue
    from antiphon.scheduler.request_table import RequestTable
    from antiphon.service.clock import Clock
    from antiphon.service.peers import Peer, PeerTable
    from antiphon.wire.base import Attempt, Process, Term
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import InstanceId, ModelName, RequestId
    from antiphon.wire.submit import OwnerSeal

log = logging.getLogger(__name__)


class Leader(Protocol):
    """What a migration needs of the leader term."""

    term: Term
    model: ModelName
    rules: LeaderConfig
    clock: Clock
    peers: PeerTable
    assignments: WorkerAssignments
    ledger: RequestTable
    queue: SchedulerQueue
    outbox: CommandOutbox
    ready: bool

    def leave(self, entry: RequestEntry) -> None: ...

    def restart(self, entry: RequestEntry) -> None: ...

    def rebind(self, entry: RequestEntry, detokenizer: Peer) -> None: ...

    def fail(self, entry: RequestEntry, error: EngineError) -> None: ...

    def detokenizer_of(self, worker: Process) -> Peer | None: ...


class Migration:
    """The requests of a leader term that are between two attempts."""

    def __init__(self, leader_term: Leader) -> None:
        self._leader_term = leader_term
        self._peers = leader_term.peers
        self._clock = leader_term.clock
        self._rules = leader_term.rules
        self._orphans: dict[RequestId, Attempt] = {}  # their detokenizers have died

    def begin(self, entry: RequestEntry) -> None:
        """Seal all attempts of a request, wherever its detokenizer may be, and unbind it."""
        binding = entry.binding
        known = [each for each in (entry.followed, entry.sealed_to) if each is not None]
        if binding is not None:
            known.append(binding.attempt)
        self._leader_term.leave(entry)
        self._leader_term.queue.remove(entry.request_id)
        if not known:
            self._leader_term.restart(entry)
            return
        detokenizer = None if binding is None else binding.detokenizer
        known_alive = detokenizer is not None and self._peers.is_alive(detokenizer)
        waiting = {detokenizer.instance} if detokenizer and known_alive else self._alive()
        now = self._clock.now()
        entry.seen_at, entry.sealed_to = now, max(known)
        entry.sealing = Sealing(
            attempt=max(known),
            detokenizer=detokenizer,
            continues=binding is not None and bool(binding.continues),
            waiting=waiting,
            began_at=now,
            asked_at=now,
        )
        self._ask(entry, entry.sealing)
        self.conclude(entry)

    def on_sealed(self, call: SealCall, answer: AttemptsSealed) -> None:
        if not self._peers.is_alive(answer.detokenizer):
            return  # of an earlier process of this name; the present one has sealed nothing
        asked = {one.request_id: one.attempt for one in call.message.requests}
        for sealed in answer.requests:
            entry = self._leader_term.ledger.find(sealed.request_id)
            sealing = None if entry is None else entry.sealing
            if entry is None or sealing is None or asked.get(entry.request_id) != sealing.attempt:
                continue
            if sealing.by_owner:
                continue  # too late: the owner may have sealed less, and follows nothing else
            if not sealed.sealed:
                if sealed.attempt is None or sealed.attempt <= sealing.attempt:
                    continue  # no answer to this question
                # An attempt of another leader, which this one has not known.
                entry.sealed_to = sealing.attempt = sealed.attempt
                sealing.detokenizer, sealing.waiting = answer.detokenizer, self._alive()
                self._ask(entry, sealing)
                continue
            sealing.waiting.discard(call.detokenizer)
            sealing.add(sealed, answer.detokenizer)
            self.conclude(entry)
        if answer.requests:
            self._ask_rest(call, {sealed.request_id for sealed in answer.requests})

    def _ask_rest(self, call: SealCall, answered: set[RequestId]) -> None:
        """Ask for those that did not fit into the answer: many large ones would wait for long."""
        for one in call.message.requests:
            entry = self._leader_term.ledger.find(one.request_id)
            sealing = None if entry is None else entry.sealing
            if one.request_id in answered or sealing is None or sealing.attempt != one.attempt:
                continue
            if call.detokenizer in sealing.waiting:
                sealing.asked_at = self._clock.now()
                self._leader_term.outbox.seal(call.detokenizer, one)

    def on_owner_sealed(self, entry: RequestEntry, seal: OwnerSeal) -> None:
        """Continue from what the owner has delivered, unless a later attempt is known."""
        sealing, binding = entry.sealing, entry.binding
        if sealing is None and binding is None and entry.is_sealed(seal.sealed_to):
            return  # it waits for its next attempt already
        known = [each.attempt for each in (sealing, binding) if each is not None]
        if any(attempt > seal.sealed_to for attempt in known):
            return  # the owner will follow it, or be asked to seal it, too
        entry.sealing, entry.sealed_to = None, seal.sealed_to
        entry.sealed = SealedOutput(seal.attempts, None, seal.choices) if seal.attempts else None
        entry.followed = seal.attempts[-1] if seal.attempts else None
        self._leader_term.leave(entry)
        self._leader_term.queue.remove(entry.request_id)
        self._continue(entry)

    def on_detokenizer_died(self, detokenizer: Process) -> None:
        """Nothing more is accepted there, and what was is lost: workers send it to another one."""
        for entry in self._leader_term.ledger.entries():
            sealed = entry.sealed
            if entry.sealing is not None and detokenizer.instance in entry.sealing.waiting:
                entry.sealing.waiting.discard(detokenizer.instance)
                self.conclude(entry)
            elif (
                sealed is not None
                and sealed.detokenizer == detokenizer
                and (sealed.ended or (entry.binding is None and entry.lacks_details))
            ):
                # With its end, which may not have reached the gateway, or with what only it had.
                entry.sealed = None
                self.begin(entry)
            elif entry.binding is not None and entry.binding.detokenizer == detokenizer:
                self.add_orphan(entry)
        self.rebind_orphans()

    def add_orphan(self, entry: RequestEntry) -> None:
        """Note that the detokenizer to which a request is bound is dead."""
        assert entry.binding is not None
        self._orphans[entry.request_id] = entry.binding.attempt

    def rebind_orphans(self) -> None:
        """Bind requests without a detokenizer to another one, as soon as there is one.

        A worker must have reported the request with its detokenizer: workers up to version 0.4 do
        not, and could not read the command nor those beside it.
        """
        if not self._leader_term.ready:
            return
        find = self._leader_term.assignments.find
        for request_id, attempt in list(self._orphans.items()):
            entry = self._leader_term.ledger.find(request_id)
            binding = None if entry is None else entry.binding
            if entry is None or binding is None or binding.attempt != attempt:
                del self._orphans[request_id]
            elif attempt.term > self._leader_term.term:
                continue  # no attempt of this term comes after it
            elif (held := find(request_id, attempt)) is None or held.detokenizer is None:
                continue
            elif (detokenizer := self._leader_term.detokenizer_of(binding.worker)) is not None:
                del self._orphans[request_id]
                self._leader_term.rebind(entry, detokenizer)

    def check(self, entry: RequestEntry) -> None:
        """Ask again for what was not answered, and give up after some time."""
        sealing, now = entry.sealing, self._clock.now()
        assert sealing is not None
        if now - sealing.began_at >= self._rules.beats(ATTEMPT_TIMEOUT_BEATS):
            self._leader_term.fail(entry, WorkerLost("the output was not sealed"))
        elif now - sealing.began_at >= self._rules.beats(SEAL_TIMEOUT_BEATS) and sealing.waiting:
            sealing.waiting.clear()
            self.conclude(entry)
        elif now - sealing.asked_at >= self._rules.beat_s:
            self._ask(entry, sealing)

    def conclude(self, entry: RequestEntry) -> None:
        """Queue a request that is sealed, if its submit is known: it may come later."""
        sealing = entry.sealing
        if sealing is None or sealing.waiting or sealing.by_owner or entry.submit is None:
            return
        found = sealing.found
        if found is not None:
            if (size_bytes := found.size_bytes) is not None:
                is_details = size_bytes > DETAILS_BYTES_MAX
                bytes_max = DETAILS_BYTES_MAX if is_details else self._rules.payload_bytes_max
                self._fail_too_large(entry, size_bytes, bytes_max)
                return
            entry.sealed = self._output(found, sealing.found_at)
        # Its owner may follow a later attempt than its open list has named so far.
        if not (sealing.complete and entry.continues(entry.followed)):
            sealing.by_owner = True
            self._ask(entry, sealing)
            return
        entry.sealing = None
        entry.seen_at = self._clock.now()
        if not entry.end_is_sent:
            self._continue(entry)

    def _continue(self, entry: RequestEntry) -> None:
        """Queue a sealed request, to be bound again."""
        sealed_to = entry.sealed_to
        if sealed_to is not None and sealed_to.term > self._leader_term.term:
            # Of a term that no election gives: what is bound in this one would be refused.
            self._leader_term.fail(entry, WorkerLost("the answer that was being read is lost"))
            return
        bytes_max = self._rules.payload_bytes_max
        if continuation_bytes(entry) > bytes_max and entry.sealed is not None:
            entry.sealed = entry.sealed.without_details()
        if (size_bytes := continuation_bytes(entry)) > bytes_max:
            self._fail_too_large(entry, size_bytes, bytes_max)
            return
        log.info("request migrates", extra={"request_id": entry.request_id})
        self._leader_term.restart(entry)

    def _fail_too_large(self, entry: RequestEntry, size_bytes: int, bytes_max: int) -> None:
        error = WorkerLost.too_large(size_bytes=size_bytes, bytes_max=bytes_max)
        self._leader_term.fail(entry, error)

    def detokenizer(
        self, entry: RequestEntry, place: PlacementTarget
    ) -> tuple[Process, tuple[str, ...]]:
        """The detokenizer of the next attempt, and what it reads: the one that has its text."""
        if entry.sealed is not None and entry.sealed.detokenizer is not None:
            peer = self._peers.find(entry.sealed.detokenizer.instance)
            if peer is not None and peer.process == entry.sealed.detokenizer:
                return peer.process, peer.heartbeat.reads
        return place.detokenizer, place.reads

    @staticmethod
    def _output(found: SealedRequest, detokenizer: Process | None) -> SealedOutput:
        assert found.attempt is not None
        assert detokenizer is not None
        attempts = (*found.lineage, found.attempt)
        return SealedOutput(attempts, detokenizer, found.choices, failed=found.failed)

    def _ask(self, entry: RequestEntry, sealing: Sealing) -> None:
        sealing.asked_at = self._clock.now()
        request = SealRequest(request_id=entry.request_id, attempt=sealing.attempt)
        if sealing.by_owner:
            self._leader_term.outbox.seal_by_owner(entry.owner, request)
        elif entry.submit is None:
            self._leader_term.outbox.request_resubmission(entry.owner, [entry.request_id])
        for detokenizer in sorted(sealing.waiting):  # so that a simulation is reproducible
            self._leader_term.outbox.seal(detokenizer, request)

    def _alive(self) -> set[InstanceId]:
        model = self._leader_term.model
        peers = self._peers.with_role(Role.DETOKENIZER)
        return {peer.process.instance for peer in peers if peer.heartbeat.model == model}
