"""Cache-aware placement: which request is next, and its worker and detokenizer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.scheduler.request_table import (
    RequestCost,
    RequestEntry,
    RequestTable,
    WorkerCapacity,
)
from antiphon.wire.base import Process, ProcessState, Role
from antiphon.wire.claim import PromptClaim
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES
from antiphon.wire.errors import EngineError, PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from antiphon.scheduler.leader_config import LeaderConfig
    from antiphon.scheduler.queue import SchedulerQueue
    from antiphon.scheduler.worker_caches import WorkerCaches
    from antiphon.service.clock import Clock
    from antiphon.service.peers import Peer, PeerTable
    from antiphon.wire.heartbeat import WorkerLoad
    from antiphon.wire.ids import InstanceId, ModelName, RequestId
    from antiphon.wire.submit import SubmitRequest


QUEUE_SCAN_MAX = 64
"""How many waiting requests are checked for a worker that those before them cannot use."""


ALONE_WORKERS_MIN = 2
"""So many workers must be ready to risk one."""


@dataclass(frozen=True, slots=True)
class PlacementTarget:
    """The worker and the detokenizer of a request.

    Attributes:
        reads: The detokenizer's, by its heartbeat.
        cached_blocks: Blocks of its prompt in the worker's prefix cache.
    """

    worker: Process
    detokenizer: Process
    reads: tuple[str, ...]
    charge: RequestCost
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A healthy worker; `fetches_prompts` unless it is of version 0.4 or earlier."""

    worker: Process
    load: WorkerLoad
    account: WorkerCapacity
    fetches_prompts: bool = False


@dataclass(eq=False)
class Placement:
    """Chooses the worker with the lowest cost for a request, of those with free capacity.

    The cost of a worker is counted in prompt blocks: uncached blocks of this prompt, blocks of
    other prompts that the worker has still to compute, and a fixed number of blocks for each
    running request, scaled by the worker's size. So a prompt goes where its prefix is cached, until
    that worker has so much more to do than another that computing the prefix twice is cheaper.

    Each worker uses one detokenizer, so that the output of a step is one message.
    """

    model: ModelName
    peers: PeerTable
    rules: LeaderConfig
    caches: WorkerCaches
    ledger: RequestTable
    _detokenizers: dict[InstanceId, InstanceId] = field(
        default_factory=dict["InstanceId", "InstanceId"], init=False
    )

    def check(self, submit: SubmitRequest) -> None:
        """Reject a request that no live worker could ever take.

        Raises:
            PromptTooLong: The prompt is too long for all of them.
        """
        tokens_max, prompt_tokens = self._tokens_max(), submit.prompt_tokens
        least = prompt_tokens + min(submit.sampling.max_new_tokens, 1)
        if tokens_max is not None and least > tokens_max:
            raise PromptTooLong.of(prompt_tokens=prompt_tokens, tokens_max=tokens_max)

    def choose(
        self,
        submit: SubmitRequest,
        *,
        avoid: Container[Process] = (),
        kept: Container[Process] = (),
    ) -> PlacementTarget | None:
        """Choose a worker for a request, none of `kept`; None while it must wait.

        Those in `avoid` are used only if no other can take it.
        """
        candidates = [
            one
            for one in self.able(submit)
            if one.worker not in kept
            and one.account.fits(one.load, self.rules, request_cost(submit, one.load))
        ]
        others = [one for one in candidates if one.worker not in avoid]
        return self._best(submit, others or candidates)

    def choose_alone(self, submit: SubmitRequest) -> tuple[PlacementTarget | None, Process | None]:
        """Choose a worker for a request that must begin alone there; or one that has to be emptied.

        There is none while another request runs alone, nor for the last worker that is ready: if
        the request kills it, no request is served.
        """
        if not self.can_isolate or any(one.account.alone for one in self._healthy()):
            return None, None
        able = [one for one in self.able(submit) if not one.account.suspended]
        if not able:
            return None, None
        emptiest = min(able, key=lambda one: one.account.occupied)
        if emptiest.account.occupied:
            return None, emptiest.worker
        return self._best(submit, [emptiest]), emptiest.worker

    @property
    def has_ready_worker(self) -> bool:
        return any(True for _ in self._healthy())

    @property
    def can_isolate(self) -> bool:
        return sum(1 for _ in self._healthy()) >= ALONE_WORKERS_MIN

    def choose_preempting(self, submit: SubmitRequest) -> PlacementTarget | None:
        """Choose a worker without a free slot that runs requests which this one preempts."""
        precedence = self.rules.precedence
        if not precedence.priority:
            return None
        rank = precedence.rank(submit.priority)
        candidates: list[Candidate] = []
        for one in self.able(submit):
            yielding = self.ledger.preempted(one.worker, rank, precedence)
            charge = request_cost(submit, one.load)
            if yielding and one.account.fits(one.load, self.rules, charge, yielding):
                candidates.append(one)
        return self._best(submit, candidates)

    def able(self, submit: SubmitRequest) -> list[Candidate]:
        """Workers whose context fits the prompt and the longest answer to it.

        Where no worker fits so long an answer, it is cut to the longest context of them.
        """
        tokens = submit.prompt_tokens + submit.sampling.max_new_tokens
        if (tokens_max := self._tokens_max()) is not None:
            tokens = min(tokens, tokens_max)
        fitting = (one for one in self._healthy() if tokens <= one.load.context_tokens)
        return [one for one in fitting if submit.prompt is None or one.fetches_prompts]

    def has_free_slots_outside(self, kept: Container[Process]) -> bool:
        """Whether a worker outside `kept` has a free slot."""
        return any(
            not one.account.suspended and one.account.free_slots(one.load, self.rules.look_ahead)
            for one in self._healthy()
            if one.worker not in kept
        )

    def queued(self) -> int:
        """Count the bound requests that wait at their workers for a slot."""
        return sum(
            self.ledger.capacity(peer.process).queued(peer.heartbeat.worker)
            for peer in self.peers.with_role(Role.WORKER)
            if peer.heartbeat.model == self.model and peer.heartbeat.worker is not None
        )

    def _best(self, submit: SubmitRequest, candidates: list[Candidate]) -> PlacementTarget | None:
        if not candidates:
            return None
        cached = self.caches.overlaps(submit.block_digests)
        blocks = len(submit.block_digests) // DIGEST_BYTES
        if submit.prompt is not None:  # it comes with the digests of its first blocks only
            blocks = submit.prompt_tokens // BLOCK_TOKENS
        running_most = max(one.load.running_max for one in candidates)

        def cost(one: Candidate) -> float:
            to_compute = blocks - cached.get(one.worker, 0) + one.account.blocks_pending
            share = one.account.occupied * running_most / one.load.running_max
            return self.rules.prefill_weight * to_compute + self.rules.request_blocks * share

        # Ties go by name, so that a simulation is reproducible.
        best = min(candidates, key=cost)
        if (detokenizer := self.detokenizer_of(best.worker.instance)) is None:
            return None
        found, reads = cached.get(best.worker, 0), detokenizer.heartbeat.reads
        charge = request_cost(submit, best.load, blocks - found)
        return PlacementTarget(best.worker, detokenizer.process, reads, charge, found)

    def _healthy(self) -> Iterator[Candidate]:
        for peer in self._working(Role.WORKER):
            load = peer.heartbeat.worker
            if load is not None and not load.paused and not stalled(load, self.rules.stall_s):
                account = self.ledger.capacity(peer.process)
                fetches = PromptClaim.__name__ in peer.heartbeat.reads
                yield Candidate(peer.process, load, account, fetches_prompts=fetches)

    def _tokens_max(self) -> int | None:
        """The longest context of all live workers; None while that of some is unknown."""
        longest = None
        for peer in self.peers.with_role(Role.WORKER):
            beat = peer.heartbeat
            if beat.model == self.model and beat.state is not ProcessState.DRAINING:
                if beat.worker is None:
                    return None  # a worker that is loading its model may have a longer one
                longest = max(longest or 0, beat.worker.context_tokens)
        return longest

    def detokenizer_of(self, worker: InstanceId) -> Peer | None:
        ready = {peer.process.instance: peer for peer in self._working(Role.DETOKENIZER)}
        current = self._detokenizers.get(worker)
        if current is not None and current in ready:
            return ready[current]
        if not ready:
            return None
        workers = {peer.process.instance for peer in self._working(Role.WORKER)}
        self._detokenizers = {w: d for w, d in self._detokenizers.items() if w in workers}
        taken = list(self._detokenizers.values())
        chosen = min(ready, key=taken.count)
        self._detokenizers[worker] = chosen
        return ready[chosen]

    def _working(self, role: Role) -> list[Peer]:
        return [
            peer for peer in self.peers.accepting_work(role) if peer.heartbeat.model == self.model
        ]


def request_cost(submit: SubmitRequest, load: WorkerLoad, blocks: int = 0) -> RequestCost:
    pages = submit.prompt_tokens // load.page_tokens + 1
    return RequestCost(choices=submit.choices, pages=pages, blocks=blocks)


def stalled(load: WorkerLoad, stall_s: float) -> bool:
    """Whether requests are running and no step has ended for `stall_s`."""
    return load.live > 0 and load.step_age_s > stall_s


@dataclass(frozen=True, slots=True)
class QueueExit:
    """A request that leaves the queue: to `place`, with `error`, or past its deadline."""

    entry: RequestEntry
    submit: SubmitRequest
    place: PlacementTarget | None = None
    error: EngineError | None = None


@dataclass(eq=False)
class Dispatcher:
    """Finds the next request that can leave the queue. Changes neither queue nor table."""

    queue: SchedulerQueue
    ledger: RequestTable
    placement: Placement
    clock: Clock

    def next(self) -> QueueExit | None:
        """Find the next request; None while all of them must wait.

        A waiting request reserves the workers that could run it against the requests behind it, and
        no other workers. Where all slots are taken, the request of the highest rank goes to a
        worker where it preempts others.
        """
        reserved: set[Process] = set()
        for request_id in itertools.islice(self.queue.in_order(self.clock.now()), QUEUE_SCAN_MAX):
            entry, submit = self._waiting(request_id)
            if entry.deadline_unix_ms <= self.clock.unix_ms():
                return QueueExit(entry, submit)
            try:
                self.placement.check(submit)
            except PromptTooLong as error:
                return QueueExit(entry, submit, error=error)
            if entry.isolated:
                place, worker = self.placement.choose_alone(submit)
                if place is not None:
                    return QueueExit(entry, submit, place)
                reserved.update(() if worker is None else (worker,))
                continue
            place = self.placement.choose(submit, avoid=entry.requeued_by, kept=reserved)
            if place is not None:
                return QueueExit(entry, submit, place)
            reserved.update(one.worker for one in self.placement.able(submit))
            if not self.placement.has_free_slots_outside(reserved):
                break
        return self._match_over()

    def _match_over(self) -> QueueExit | None:
        if (request_id := self.queue.highest()) is None:
            return None
        entry, submit = self._waiting(request_id)
        if entry.isolated:
            return None
        place = self.placement.choose_preempting(submit)
        return None if place is None else QueueExit(entry, submit, place)

    def _waiting(self, request_id: RequestId) -> tuple[RequestEntry, SubmitRequest]:
        entry = self.ledger.find(request_id)
        assert entry is not None, "a queued request is not in the request table"
        assert entry.submit is not None, "a queued request has no submit"
        return entry, entry.submit
