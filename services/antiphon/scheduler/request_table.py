"""Everything a leader has accepted and not seen end: who owns it, and where it runs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from antiphon.scheduler.capacity import RequestCost, WorkerCapacity
from antiphon.scheduler.leader_config import FREE_AFTER_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.service.priority import PriorityPolicy
    from antiphon.wire.base import Attempt, Process
    from antiphon.wire.ids import InstanceId, RequestId
    from antiphon.wire.submit import SubmitRequest

STALE_LEAST = 64
"""Deadlines of requests that have gone which are not worth a sweep."""


@dataclass(slots=True)
class Binding:
    """A request's worker and detokenizer. The detokenizer of another leader's is not known.

    Attributes:
        steps: The detokenizer reads `TokenStep`.
    """

    attempt: Attempt
    worker: Process
    detokenizer: InstanceId | None
    admitted_at: float
    steps: bool = False


@dataclass(slots=True)
class RequestEntry:
    """One request.

    Attributes:
        deadline_unix_ms: By our clock; that of `submit` is by its owner's.
        came_at: When its owner sent it first, by our clock: to whoever led then.
        queued_at: Since when it waits to be started.
        submit: What to admit; none for a request found at a worker and never submitted here.
        followed: The attempt whose text its owner follows, by its open list.
        seen_at: When it last was bound, or seen to go on at its worker.
        disputed_at: Since when the owner follows another attempt than the bound one.
        number: In the order in which they were added.
        losses: Attempts of it that have failed.
        returned_by: Workers that gave it back.
        standing: By the schedule policy, once it has waited.
    """

    request_id: RequestId
    owner: Process
    deadline_unix_ms: int
    since: float
    seen_at: float
    came_at: float
    queued_at: float
    submit: SubmitRequest | None = None
    followed: Attempt | None = None
    binding: Binding | None = None
    disputed_at: float | None = None
    number: int = 0
    failed_attempts: int = 0
    requeued_by: set[Process] = field(default_factory=set["Process"])
    policy_key: float | None = None

    @classmethod
    def of(cls, submit: SubmitRequest, now: float, due_ms: int) -> RequestEntry:
        """Make that of a request that has just come from its owner, due then by our clock."""
        came_at = now - submit.waited_ms / 1000
        return cls(
            submit.request_id,
            submit.owner,
            due_ms,
            since=now,
            seen_at=now,
            came_at=came_at,
            queued_at=came_at,
            submit=submit,
            followed=submit.attempt_floor,
        )

    @property
    def restartable(self) -> bool:
        """Whether it may begin again: nobody has seen a word of it, and we know what it is."""
        return self.submit is not None and self.followed is None

    def wait(self, now: float) -> None:
        """Begin all patience with it anew."""
        self.seen_at = now
        self.disputed_at = None
        if self.binding is not None:
            self.binding.admitted_at = now


class RequestTable:
    """The entries by request, and the accounts by worker."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, RequestEntry] = {}
        self._owned: dict[Process, dict[RequestId, RequestEntry]] = {}
        self._accounts: defaultdict[Process, WorkerCapacity] = defaultdict(WorkerCapacity)
        self._numbers = itertools.count(1)
        self._due: list[tuple[int, int, RequestId]] = []  # a heap, with stale ones

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, request_id: RequestId) -> RequestEntry | None:
        """Return the entry of a request."""
        return self._entries.get(request_id)

    def add(self, entry: RequestEntry) -> None:
        """Begin to keep a request."""
        assert entry.request_id not in self._entries
        self._entries[entry.request_id] = entry
        self._owned.setdefault(entry.owner, {})[entry.request_id] = entry
        entry.number = next(self._numbers)
        heappush(self._due, (entry.deadline_unix_ms, entry.number, entry.request_id))
        if len(self._due) > 2 * len(self._entries) + STALE_LEAST:
            self._due = [due for due in self._due if self._due_entry(due) is not None]
            heapify(self._due)

    def take_due(self, unix_ms: int) -> list[RequestEntry]:
        """Return whose deadline has come: each once then, and once when it is freed anyway."""
        found: list[RequestEntry] = []
        while self._due and self._due[0][0] <= unix_ms:
            due = heappop(self._due)
            entry = self._due_entry(due)
            if entry is None:
                continue
            found.append(entry)
            if unix_ms < (free_ms := entry.deadline_unix_ms + FREE_AFTER_MS):
                heappush(self._due, (free_ms, *due[1:]))
        return found

    def remove(self, entry: RequestEntry) -> None:
        """Keep a request no more."""
        self.unbind(entry)
        del self._entries[entry.request_id]
        owned = self._owned[entry.owner]
        del owned[entry.request_id]
        if not owned:
            del self._owned[entry.owner]

    def bind(
        self, entry: RequestEntry, binding: Binding, charge: RequestCost | None = None
    ) -> None:
        """Note where a request runs, in place of where it ran.

        Without a charge it runs there already, and its worker's report counts its pages.
        """
        self.unbind(entry)
        entry.binding = binding
        choices = 1 if entry.submit is None else entry.submit.choices
        running = RequestCost(choices=choices, waiting=False, computing=False)
        self._accounts[binding.worker].bind(entry.request_id, charge or running)

    def unbind(self, entry: RequestEntry) -> None:
        """Note that a request runs nowhere."""
        if entry.binding is not None:
            self._accounts[entry.binding.worker].unbind(entry.request_id)
            entry.binding = None

    def entries(self) -> list[RequestEntry]:
        """Return all of them, oldest first."""
        return list(self._entries.values())

    def bound(self) -> list[RequestEntry]:
        """Return those that are bound to a worker."""
        accounts = self._accounts.values()
        return [self._entries[name] for account in accounts for name in account.costs]

    def owners(self) -> list[Process]:
        """Return the gateways that own any."""
        return list(self._owned)

    def owned(self, owner: Process) -> Mapping[RequestId, RequestEntry]:
        """Return one gateway's: good until one more is kept, or one less."""
        return self._owned.get(owner, {})

    def bound_to(self, worker: Process) -> list[RequestEntry]:
        """Return one worker's, in order of their ids, so that a simulation repeats itself."""
        account = self._accounts.get(worker)
        return [self._entries[name] for name in sorted(account.costs)] if account else []

    def preempted(self, worker: Process, rank: int, precedence: PriorityPolicy) -> set[RequestId]:
        """Return who gives way, on one worker, to a request of this rank."""
        account = self._accounts.get(worker)
        submits = (self._entries[name].submit for name in account.costs) if account else ()
        return {
            submit.request_id
            for submit in submits
            if submit is not None and precedence.preempts(rank, precedence.rank(submit.priority))
        }

    def capacity(self, worker: Process) -> WorkerCapacity:
        """Return what a worker has got."""
        return self._accounts[worker]

    def close(self, worker: Process) -> None:
        """Drop the account of a dead worker. Nothing is bound to it any more."""
        account = self._accounts.pop(worker, None)
        assert account is None or not account.costs

    def _due_entry(self, due: tuple[int, int, RequestId]) -> RequestEntry | None:
        """Whose time it is; None for one that is no longer kept."""
        _, number, request_id = due
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.number == number else None
