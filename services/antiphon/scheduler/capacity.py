"""How much more one worker may be given: counted from its load report and what it got since."""

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
        choices: Answers to it: each takes a place.
        pages: Of its prompt and the first token after it.
        blocks: Of its prompt that the worker has to compute.
        waiting: Its worker has not said yet that it runs: its pages are not among those that the
            worker counts as taken or promised.
        computing: Its worker has not said yet that its prompt is computed.
    """

    choices: int = 1
    pages: int = 0
    blocks: int = 0
    waiting: bool = True
    computing: bool = True


@dataclass(slots=True)
class WorkerCapacity:
    """What one leader has put on one worker.

    Attributes:
        charges: Of the requests that are bound to it, ended ones among them.
        strays: What it still ran in its last report though it should not.
        ended: What is bound to it, and had ended by then.
        shut: It has given something back since its last report, and gets nothing before the next.
        pages_back: Of prompts that have left since its last report, which counts them as taken.
    """

    costs: dict[RequestId, RequestCost] = field(default_factory=dict[RequestId, RequestCost])
    orphans: set[RequestId] = field(default_factory=set[RequestId])
    ended: set[RequestId] = field(default_factory=set[RequestId])
    suspended: bool = False
    pages_back: int = 0

    def bind(self, request_id: RequestId, charge: RequestCost) -> None:
        """Count a request that is its own from here on."""
        self.costs[request_id] = charge
        self.orphans.discard(request_id)

    def unbind(self, request_id: RequestId) -> None:
        """Count a request no more, unless its next report holds it."""
        charge = self.costs.pop(request_id, None)
        if charge is not None and not charge.waiting and request_id not in self.ended:
            self.pages_back += charge.pages
        self.ended.discard(request_id)

    def report(self, lines: Iterable[RunningRequest]) -> None:
        """Count anew from what a load report says that the worker holds."""
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
        """Places taken."""
        return _choices(self._live()) + len(self.orphans)

    @property
    def blocks_pending(self) -> int:
        """Blocks of prompts that it has still to compute, as far as it has said."""
        return sum(charge.blocks for charge in self._live() if charge.computing)

    def free_slots(self, load: WorkerLoad, look_ahead: int) -> int:
        """Count the answers that may still be bound to it."""
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
        """Pages that one more request may count on, by the time that it is there.

        Those that running requests are about to take are none of them, those that surely come back
        are, and those of whoever was bound and does not run yet are gone.
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
        """Whether it has places and pages for one more request.

        A request of many answers needs no more places than are looked ahead: should it wait for one
        each, slots would stand empty meanwhile, and so would everybody behind it. An idle worker
        takes any: what does not fit then never will, and it says so itself.

        Args:
            load: What it has reported.
            rules: How much is bound to it beyond what it runs.
            charge: Of the request.
            yielding: Who gives way to the request, should they meet there.
        """
        occupied = self.occupied
        if self.suspended or occupied == 0:
            return not self.suspended
        if occupied + charge.choices > load.running_max + rules.waiting_max:
            return False  # it would give the request back
        live = {name: one for name, one in self.costs.items() if name not in self.ended}
        gone = [one for name, one in live.items() if name in yielding]
        places = min(charge.choices, rules.look_ahead)
        if occupied - _choices(gone) + places > load.running_max + rules.look_ahead:
            return False
        if charge.pages <= self.pages_available(load) + sum(one.pages for one in gone):
            return True
        # Who gives way leaves the pages of its answer too, and only the worker knows how many: so
        # a few may go and see.
        waiting = [one for name, one in live.items() if one.waiting and name not in yielding]
        return bool(gone) and _choices(waiting) + places <= rules.look_ahead

    def _live(self) -> Iterable[RequestCost]:
        ended = self.ended
        return (charge for name, charge in self.costs.items() if name not in ended)


def _choices(charges: Iterable[RequestCost]) -> int:
    return sum(charge.choices for charge in charges)


def pages_needed(prompt_ids: bytes, page_tokens: int) -> int:
    """Count the pages of a prompt and the first token after it."""
    return id_count(prompt_ids) // page_tokens + 1
