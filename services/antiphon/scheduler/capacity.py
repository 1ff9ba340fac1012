"""Free capacity of one worker: its load report, and what was bound to it since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.codec import id_count
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from antiphon.scheduler.leader_config import LeaderConfig
    from antiphon.wire.heartbeat import RunningRequest, WorkerLoad


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
    """

    costs: dict[RequestId, RequestCost] = field(default_factory=dict[RequestId, RequestCost])
    orphans: set[RequestId] = field(default_factory=set[RequestId])
    ended: set[RequestId] = field(default_factory=set[RequestId])
    suspended: bool = False
    pages_back: int = 0

    def bind(self, request_id: RequestId, charge: RequestCost) -> None:
        self.costs[request_id] = charge
        self.orphans.discard(request_id)

    def unbind(self, request_id: RequestId) -> None:
        """Stop counting a request, unless the next report holds it."""
        charge = self.costs.pop(request_id, None)
        if charge is not None and not charge.waiting and request_id not in self.ended:
            self.pages_back += charge.pages
        self.ended.discard(request_id)

    def report(self, lines: Iterable[RunningRequest]) -> None:
        self.orphans, self.ended = set(), set()
        self.suspended, self.pages_back = False, 0
        for line in lines:
            charge = self.costs.get(line.request_id)
            if charge is not None:
                charge.waiting = line.waiting
                charge.computing = line.waiting or not line.tokens
                if line.ended:
                    self.ended.add(line.request_id)
            elif not line.ended:
                self.orphans.add(line.request_id)

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
        if self.suspended or occupied == 0:
            return not self.suspended
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


def pages_needed(prompt_ids: bytes, page_tokens: int) -> int:
    return id_count(prompt_ids) // page_tokens + 1
