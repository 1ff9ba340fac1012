"""The requests that a leader has accepted and that have not ended, and what they take."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from antiphon.scheduler.leader_config import DEATHS_MAX, FREE_AFTER_MS, LeaderConfig
from antiphon.wire.codec import id_count
from antiphon.wire.ids import InstanceId, RequestId, TenantId

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from antiphon.service.priority import PriorityPolicy
    from antiphon.wire.base import Attempt, Process
    from antiphon.wire.command import ChoiceOutput
    from antiphon.wire.heartbeat import RunningRequest, WorkerLoad
    from antiphon.wire.seal import SealedRequest
    from antiphon.wire.submit import SubmitRequest

STALE_LEAST = 64
"""Number of stale heap entries that is not worth a sweep."""


TOMBSTONES_MAX = 65_536
"""Maximum number of ids; beyond it the one that expires first is dropped."""


@dataclass(frozen=True, slots=True)
class SealedOutput:
    """The output of a request that its next attempt continues.

    Attributes:
        attempts: The sealed ones of which it is, the last one last.
        detokenizer: The one that has sealed it, which has its text; None: its owner has sealed it.
        failed: The detokenizer has ended the request with an error.
    """

    attempts: tuple[Attempt, ...]
    detokenizer: Process | None
    choices: tuple[ChoiceOutput, ...]
    failed: bool = False

    @property
    def ended(self) -> bool:
        return self.failed or all(choice.finish_reason is not None for choice in self.choices)

    def without_details(self) -> SealedOutput:
        """The same without token outputs, if the detokenizer of the next attempt has them."""
        if self.detokenizer is None:
            return self
        choices = tuple(msgspec.structs.replace(each, details=None) for each in self.choices)
        return replace(self, choices=choices)


@dataclass(slots=True)
class Sealing:
    """A request whose attempts are being sealed.

    Attributes:
        attempt: The one to be sealed, with all earlier ones.
        detokenizer: The process to which that was bound: it alone can have its output. None: it is
            unknown.
        continues: Whether the attempt continues others.
        waiting: The detokenizers that have not answered.
        by_owner: No detokenizer has the output, so that its owner is to seal what it delivered.
        complete: Whether a detokenizer has answered that has all output of the attempt.
        found: What was found so far.
    """

    attempt: Attempt
    detokenizer: Process | None
    continues: bool
    waiting: set[InstanceId]
    began_at: float
    asked_at: float
    by_owner: bool = False
    complete: bool = False
    found: SealedRequest | None = None
    found_at: Process | None = None

    def add(self, sealed: SealedRequest, detokenizer: Process) -> None:
        """Note what a detokenizer has found, if that is more than others have.

        Without output it may lack only what earlier attempts have shown, which is still on its way.
        """
        found = None if self.found is None else self.found.attempt
        if sealed.attempt is not None and (found is None or found < sealed.attempt):
            self.found, self.found_at = sealed, detokenizer
        if detokenizer == self.detokenizer:
            self.complete = sealed.attempt is not None or not self.continues
        self.complete = self.complete or sealed.attempt == self.attempt


@dataclass(slots=True)
class Binding:
    """Where a request runs.

    Attributes:
        detokenizer: The process that fixes its output; unknown if a worker of an earlier version
            reported the binding.
        reads: What the detokenizer reads, by its heartbeat.
        continues: The attempts whose output this one continues, the last one last.
        rebound: It goes on as it was at its worker, which has another detokenizer.
    """

    attempt: Attempt
    worker: Process
    detokenizer: Process | None
    admitted_at: float
    reads: tuple[str, ...] = ()
    continues: tuple[Attempt, ...] = ()
    rebound: bool = False


@dataclass(slots=True)
class RequestEntry:
    """One request.

    Attributes:
        deadline_unix_ms: By the local clock; the one in `submit` is by the gateway's clock.
        came_at: When its gateway first sent it, to any leader, by the local clock.
        queued_at: Since when it waits for its start.
        submit: None for a request found at a worker and never submitted here.
        followed: The attempt whose text its gateway follows, by its open list.
        seen_at: When it was last bound, or last reported as running by its worker.
        disputed_at: Since when the gateway follows another attempt than the bound one.
        policy_key: Its sort key by the schedule policy, once it has waited.
        migrations: How many of its attempts have failed.
        deaths: Workers that are known to have died while they had it, since it ran alone.
        sealing: Set while its attempts are being sealed.
        sealed: What its next attempt continues.
        sealed_to: The highest attempt that was sealed, or is being.
        moved_from: The latest attempt whose text goes to a gateway that has lost the request.
        adopted_at: When its gateway has last asked for it, until it lists the request.
    """

    request_id: RequestId
    owner: Process
    deadline_unix_ms: int
    since: float
    came_at: float
    submit: SubmitRequest | None = None
    followed: Attempt | None = None
    seen_at: float = field(init=False)
    queued_at: float = field(init=False)
    binding: Binding | None = None
    disputed_at: float | None = None
    number: int = 0
    migrations: int = 0
    deaths: set[Process] = field(default_factory=set["Process"])
    requeued_by: set[Process] = field(default_factory=set["Process"])
    policy_key: float | None = None
    sealing: Sealing | None = None
    sealed: SealedOutput | None = None
    sealed_to: Attempt | None = None
    moved_from: Attempt | None = None
    adopted_at: float | None = None

    @classmethod
    def of(cls, submit: SubmitRequest, now: float, due_ms: int) -> RequestEntry:
        came_at = now - submit.waited_ms / 1000
        owner, followed = submit.owner, submit.attempt_floor
        return cls(submit.request_id, owner, due_ms, now, came_at, submit, followed)

    def __post_init__(self) -> None:
        self.seen_at, self.queued_at = self.since, self.came_at

    @property
    def isolated(self) -> bool:
        """Whether its next attempt has to begin on a worker without other requests."""
        return len(self.deaths) >= DEATHS_MAX

    @property
    def tokens(self) -> int:
        """Output tokens with which its next attempt begins, of all choices."""
        choices = () if self.sealed is None else self.sealed.choices
        return sum(id_count(choice.output_ids) for choice in choices)

    @property
    def lacks_details(self) -> bool:
        """Whether only a detokenizer has token outputs that its next attempt continues."""
        submit = self.submit
        if submit is None or submit.sampling.details is None or self.sealed is None:
            return False
        return any(each.output_ids and each.details is None for each in self.sealed.choices)

    @property
    def restartable(self) -> bool:
        """Whether it may be bound: its submit is known, and the text shown is of sealed output."""
        return self.submit is not None and self.sealing is None and self.continues(self.followed)

    def continues(self, attempt: Attempt | None) -> bool:
        """Whether its next attempt has all output of this one; None has no output."""
        return attempt is None or (self.sealed is not None and attempt in self.sealed.attempts)

    @property
    def end_is_sent(self) -> bool:
        """Whether it has ended where it was sealed, and its gateway gets the end from there."""
        if self.sealed is None or not self.sealed.ended:
            return False
        return self.moved_from is None or self.sealed.attempts[-1] > self.moved_from

    def is_sealed(self, attempt: Attempt) -> bool:
        return self.sealed_to is not None and attempt <= self.sealed_to

    def wait(self, now: float) -> None:
        self.seen_at = now
        self.disputed_at = None
        if self.binding is not None:
            self.binding.admitted_at = now


class RequestTable:
    """Entries by request, and capacity by worker."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, RequestEntry] = {}
        self._owned: dict[Process, dict[RequestId, RequestEntry]] = {}
        self._accounts: defaultdict[Process, WorkerCapacity] = defaultdict(WorkerCapacity)
        self._numbers = itertools.count(1)
        self._due: list[tuple[int, int, RequestId]] = []  # a heap, stale entries included
        self.outputs = OutputBytes()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, request_id: RequestId) -> RequestEntry | None:
        return self._entries.get(request_id)

    def add(self, entry: RequestEntry) -> None:
        assert entry.request_id not in self._entries
        self._entries[entry.request_id] = entry
        self._owned.setdefault(entry.owner, {})[entry.request_id] = entry
        if entry.submit is not None:
            self.outputs.add(entry.submit)
        entry.number = next(self._numbers)
        heappush(self._due, (entry.deadline_unix_ms, entry.number, entry.request_id))
        if len(self._due) > 2 * len(self._entries) + STALE_LEAST:
            self._due = [due for due in self._due if self._due_entry(due) is not None]
            heapify(self._due)

    def take_due(self, unix_ms: int) -> list[RequestEntry]:
        """Return entries past their deadline: each once then, and once when it must be freed."""
        found: list[RequestEntry] = []
        while self._due and self._due[0][0] <= unix_ms:
            due = heappop(self._due)
            if (entry := self._due_entry(due)) is None:
                continue
            found.append(entry)
            if unix_ms < (free_ms := entry.deadline_unix_ms + FREE_AFTER_MS):
                heappush(self._due, (free_ms, *due[1:]))
        return found

    def remove(self, entry: RequestEntry) -> None:
        self.unbind(entry)
        self.outputs.remove(entry.request_id)
        del self._entries[entry.request_id]
        del self._owned[entry.owner][entry.request_id]
        if not self._owned[entry.owner]:
            del self._owned[entry.owner]

    def change_owner(self, entry: RequestEntry, owner: Process) -> None:
        del self._owned[entry.owner][entry.request_id]
        if not self._owned[entry.owner]:
            del self._owned[entry.owner]
        entry.owner = owner
        self._owned.setdefault(owner, {})[entry.request_id] = entry

    def bind(
        self, entry: RequestEntry, binding: Binding, charge: RequestCost | None = None
    ) -> None:
        """Record a request's binding, in place of an earlier one; its timeouts begin anew.

        Without a charge it runs there already, and its worker's report includes its pages.
        """
        self.unbind(entry)
        entry.binding = binding
        entry.wait(binding.admitted_at)
        choices = 1 if entry.submit is None else entry.submit.choices
        running = RequestCost(choices=choices, waiting=False, computing=False)
        self._accounts[binding.worker].bind(entry.request_id, charge or running)

    def unbind(self, entry: RequestEntry) -> None:
        if entry.binding is not None:
            self._accounts[entry.binding.worker].unbind(entry.request_id)
            entry.binding = None

    def entries(self) -> list[RequestEntry]:
        """All entries, oldest first."""
        return list(self._entries.values())

    def bound(self) -> list[RequestEntry]:
        accounts = self._accounts.values()
        return [self._entries[name] for account in accounts for name in account.costs]

    def owners(self) -> list[Process]:
        return list(self._owned)

    def owned(self, owner: Process) -> Mapping[RequestId, RequestEntry]:
        """One gateway's entries: a live view, valid until one is added or removed."""
        return self._owned.get(owner, {})

    def bound_to(self, worker: Process) -> list[RequestEntry]:
        """One worker's entries by request id, so that a simulation is reproducible."""
        return [self._entries[name] for name in sorted(self._accounts[worker].costs)]

    def preempted(self, worker: Process, rank: int, precedence: PriorityPolicy) -> set[RequestId]:
        """The requests on a worker that one of this rank preempts."""
        submits = (self._entries[name].submit for name in self._accounts[worker].costs)
        return {
            submit.request_id
            for submit in submits
            if submit is not None and precedence.preempts(rank, precedence.rank(submit.priority))
        }

    def capacity(self, worker: Process) -> WorkerCapacity:
        return self._accounts[worker]

    def close(self, worker: Process) -> None:
        """Drop the account of a dead worker. Nothing may be bound to it any more."""
        account = self._accounts.pop(worker, None)
        assert account is None or not account.costs

    def _due_entry(self, due: tuple[int, int, RequestId]) -> RequestEntry | None:
        """The entry of a deadline; None if it is stale."""
        _, number, request_id = due
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.number == number else None


class OutputBytes:
    """Maximum size of the outputs of open requests, of all of them and of each tenant."""

    def __init__(self) -> None:
        self.total = 0
        self._of_tenant: Counter[TenantId] = Counter()
        self._counted: dict[RequestId, SubmitRequest] = {}

    def of(self, tenant: TenantId) -> int:
        return self._of_tenant[tenant]

    def add(self, submit: SubmitRequest) -> None:
        """Count a request, unless it is counted."""
        if submit.output_bytes and submit.request_id not in self._counted:
            self._counted[submit.request_id] = submit
            self.total += submit.output_bytes
            self._of_tenant[submit.tenant] += submit.output_bytes

    def remove(self, request_id: RequestId) -> None:
        if (submit := self._counted.pop(request_id, None)) is not None:
            self.total -= submit.output_bytes
            self._of_tenant[submit.tenant] -= submit.output_bytes
            if not self._of_tenant[submit.tenant]:
                del self._of_tenant[submit.tenant]


class SchedulerTombstones:
    """Ids of requests that must not run again: cancelled, or ended by their gateway."""

    def __init__(self) -> None:
        self._dead: dict[RequestId, tuple[Process, int]] = {}
        self._expiry: list[tuple[int, RequestId]] = []

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._dead

    def add(self, request_id: RequestId, owner: Process, until_unix_ms: int) -> None:
        _, until = self._dead.get(request_id, (owner, 0))
        if until_unix_ms <= until:
            return
        self._dead[request_id] = (owner, until_unix_ms)
        heappush(self._expiry, (until_unix_ms, request_id))
        while len(self._expiry) > TOMBSTONES_MAX:
            self._pop()

    def was_ended_by(self, request_id: RequestId, owner: Process) -> bool:
        """Whether the id is of an ended request of this owner; another owner may reuse it."""
        dead = self._dead.get(request_id)
        return dead is not None and dead[0] == owner

    def expire(self, unix_ms: int) -> None:
        """Drop ids whose late submits can no longer arrive."""
        while self._expiry and self._expiry[0][0] <= unix_ms:
            self._pop()

    def _pop(self) -> None:
        until, request_id = heappop(self._expiry)
        # A later addition of the same id has an expiry of its own.
        if self._dead.get(request_id, (None, until))[1] == until:
            self._dead.pop(request_id, None)


@dataclass(slots=True)
class RequestCost:
    """What one bound request takes of its worker.

    Attributes:
        pages: KV cache pages for its prompt and the first token after it.
        blocks: Prompt blocks that the worker has to compute.
        waiting: The worker has not reported yet that it runs: its pages are not among those that
            the worker counts as taken or reserved.
        computing: The worker has not reported yet that its prefill is done.
    """

    choices: int = 1
    pages: int = 0
    blocks: int = 0
    waiting: bool = True
    computing: bool = True


@dataclass(slots=True)
class WorkerCapacity:
    """What one leader has bound to one worker.

    Attributes:
        costs: Of the requests bound to it, ended ones included.
        orphans: Requests that it ran at its last report although they are not bound to it.
        ended: Requests bound to it that had ended by its last report.
        suspended: It has requeued a request since its last report; it gets none before the next.
        pages_back: Pages of prompts that have left since its last report, which counts them as
            taken.
        alone: A request that runs there alone until it has so many output tokens.
    """

    costs: dict[RequestId, RequestCost] = field(default_factory=dict[RequestId, RequestCost])
    orphans: set[RequestId] = field(default_factory=set[RequestId])
    ended: set[RequestId] = field(default_factory=set[RequestId])
    suspended: bool = False
    pages_back: int = 0
    alone: tuple[RequestId, int] | None = None

    def bind(self, request_id: RequestId, charge: RequestCost) -> None:
        self.costs[request_id] = charge
        self.orphans.discard(request_id)

    def unbind(self, request_id: RequestId) -> None:
        """Stop counting a request, unless the next report holds it."""
        charge = self.costs.pop(request_id, None)
        if self.alone is not None and self.alone[0] == request_id:
            self.alone = None
        if charge is not None and not charge.waiting and request_id not in self.ended:
            self.pages_back += charge.pages
        self.ended.discard(request_id)

    def report(self, lines: Iterable[RunningRequest]) -> RequestId | None:
        """Note what runs there; return the request that has run alone for long enough, if any."""
        self.orphans, self.ended = set(), set()
        self.suspended, self.pages_back = False, 0
        cleared: RequestId | None = None
        for line in lines:
            if (charge := self.costs.get(line.request_id)) is not None:
                charge.waiting = line.waiting
                charge.computing = line.waiting or not line.tokens
                if line.ended:
                    self.ended.add(line.request_id)
                if self.alone is not None and self.alone[0] == line.request_id:
                    over = line.ended or line.tokens >= self.alone[1]
                    self.alone = None if over else self.alone
                    cleared = line.request_id if over else None
            elif not line.ended:
                self.orphans.add(line.request_id)
        return cleared

    @property
    def occupied(self) -> int:
        return _choices(self._live()) + len(self.orphans)

    @property
    def blocks_pending(self) -> int:
        """Prompt blocks that it has still to compute, as of its last report."""
        return sum(charge.blocks for charge in self._live() if charge.computing)

    def free_slots(self, load: WorkerLoad, look_ahead: int) -> int:
        return max(0, load.running_max + look_ahead - self.occupied)

    def queued(self, load: WorkerLoad) -> int:
        """Count the requests bound to it for which no slot is free: they wait at the worker.

        Slots are counted in the order of binding, so this holds before the worker has reported.
        """
        slots, queued = load.running_max - len(self.orphans), 0
        for charge in self._live():
            queued += slots <= 0
            slots -= charge.choices
        return queued

    def pages_available(self, load: WorkerLoad) -> int:
        """Pages that one more request can count on by the time it arrives.

        Excludes pages that running requests are about to take and pages of bound requests that do
        not run yet; includes pages that are certain to be freed.
        """
        waiting = sum(charge.pages for charge in self._live() if charge.waiting)
        back = load.pages_returning + self.pages_back
        return load.pages_free - load.pages_promised + back - waiting

    def fits(
        self,
        load: WorkerLoad,
        rules: LeaderConfig,
        charge: RequestCost,
        yielding: Container[RequestId] = (),
    ) -> bool:
        """Whether it has slots and pages for one more request.

        A request with many choices needs at most as many free slots as the look-ahead: if it waited
        for one slot per choice, slots would stay empty meanwhile, and the requests behind it would
        wait. An idle worker accepts any request: what does not fit then never will, and the worker
        rejects it itself. The new request may preempt those in `yielding`.
        """
        occupied = self.occupied
        if self.suspended or self.alone is not None or occupied == 0:
            return not self.suspended and self.alone is None
        if occupied + charge.choices > load.running_max + rules.waiting_max:
            return False  # it would requeue the request
        live = {name: one for name, one in self.costs.items() if name not in self.ended}
        gone = [one for name, one in live.items() if name in yielding]
        slots = min(charge.choices, rules.look_ahead)
        if occupied - _choices(gone) + slots > load.running_max + rules.look_ahead:
            return False
        if charge.pages <= self.pages_available(load) + sum(one.pages for one in gone):
            return True
        # A preempted request also frees the pages of its output, and only the worker knows how
        # many: so a few requests may be sent there to try.
        waiting = [one for name, one in live.items() if one.waiting and name not in yielding]
        return bool(gone) and _choices(waiting) + slots <= rules.look_ahead

    def _live(self) -> Iterable[RequestCost]:
        ended = self.ended
        return (charge for name, charge in self.costs.items() if name not in ended)


def _choices(charges: Iterable[RequestCost]) -> int:
    return sum(charge.choices for charge in charges)
