"""The choice of what is computed next: who goes on, who starts and who gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.batching.decode import ScheduledRow, ensure_pages, pages_needed
from antiphon.model_worker.batching.faults import RequestFault
from antiphon.model_worker.batching.page_budget import fits
from antiphon.model_worker.batching.preemption import choose_preempted
from antiphon.model_worker.batching.token_budget import TokenBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.admission import EngineLimits
    from antiphon.model_worker.batching.policy import QueueRules
    from antiphon.model_worker.batching.queue import WaitingQueue
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.running_batch import RunningBatch
    from antiphon.model_worker.batching.timeouts import Timeouts
    from antiphon.model_worker.cache.table import PageTable


TOUCH_STEPS = 32
"""How long a touched prefix is safe enough: what was of use later is evicted later. Touching all
that wait in each step that evicts would cost as much as planning it does."""


class StepPlanner:
    """Moves requests between the queue and their slots, and says who has a row in the next plan.

    Attributes:
        retractions: Requests that lost their pages because none were left, since start.
        retracted_tokens: Tokens that these had in the cache.
        retracted_prompt_tokens: Of those, the prompts'.
        preemptions: Requests that lost their pages to one that outranks them, since start.
    """

    def __init__(
        self,
        limits: EngineLimits,
        rules: QueueRules,
        batch: RunningBatch,
        waiting: WaitingQueue,
        timeouts: Timeouts,
    ) -> None:
        self.retractions = 0
        self.retracted_tokens = 0
        self.retracted_prompt_tokens = 0
        self.preemptions = 0
        self._limits = limits
        self._rules = rules
        self._batch = batch
        self._waiting = waiting
        self._timeouts = timeouts
        self._started: list[Request] = []
        self._decodes_due = False
        self._pages_short = False
        self._steps = 0
        batch.page_budget.before_eviction = self._touch_waiting

    def schedule(self, now: float) -> list[ScheduledRow]:
        """Whose tokens are computed next, and up to which. They have the pages for it.

        Whoever had to give way for a later one is among them too, and has no slot any more.
        """
        batch = self._batch
        if not batch.running:
            batch.page_budget.ratio.reset()
        self._pages_short = False
        self._steps += 1
        self._preempt()
        budget = TokenBudget(self._limits, batch.pools.page_tokens, batch.checkpoints)
        # Some of these may give way to others while these are chosen: they have no table then.
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in batch.running.values():
            (decoding if request.answers else prefilling).append(request)
        if self._limits.mixed:
            return self._decodes(decoding, budget) + self._prefills(prefilling, budget, now)
        if self._decodes_due:
            scheduled = self._decodes(decoding, budget) or self._prefills(prefilling, budget, now)
        else:
            scheduled = self._prefills(prefilling, budget, now) or self._decodes(decoding, budget)
        self._decodes_due = any(not request.answers for request, _ in scheduled)
        return scheduled

    def allocate_pages(self, scheduled: Sequence[ScheduledRow]) -> bool:
        """Give running requests the pages of their next rows, unless somebody had to give way."""
        if not self._batch.page_budget.ensure_free(pages_needed(scheduled)):
            return False
        for request, end in scheduled:
            assert request.table is not None, "a running request has no pages"
            request.table.allocate(end)
            self._batch.slots.update(request)
        return True

    def count_decode_steps(self, steps: int) -> None:
        """So many steps of decodes went well without a question."""
        self._steps += steps
        for _ in range(steps):
            self._batch.page_budget.ratio.decay()

    @property
    def new_token_ratio(self) -> float:
        """Share of the longest answers for which pages are kept free."""
        return self._batch.page_budget.ratio.value

    def take_started(self) -> Sequence[Request]:
        """Those that were started for the first time since the last call."""
        if not self._started:
            return ()
        started, self._started = self._started, []
        return started

    def retract(self, request: Request) -> None:
        """Take slot and pages from a running request, and let it wait at its old place.

        What it has computed can be found again, as long as nobody needs the pages.
        """
        self._batch.cache_prefix(request)
        self._batch.release(request)
        request.retract()
        self._waiting.put(request)

    def _touch_waiting(self) -> None:
        """Keep what the next ones will find; the first of them longest, so it is touched last.

        As many are looked at as for a common beginning, so that the cost has a bound.
        """
        for request in reversed(self._waiting.head()):
            if request.touched is None or self._steps - request.touched >= TOUCH_STEPS:
                request.touched = self._steps
                self._batch.touch(request)

    def _decodes(self, decoding: Sequence[Request], budget: TokenBudget) -> list[ScheduledRow]:
        """Everybody who has begun to answer: nobody is ever left out."""
        scheduled: list[ScheduledRow] = []
        more, covered = 0, True
        for request in decoding:
            table = request.table
            try:
                if table is not None and (tokens := request.pending):
                    end = request.planned + tokens
                    scheduled.append((request, end))
                    more += tokens - 1
                    covered = covered and table.covers(end)
            except Exception as error:
                raise RequestFault(request) from error
        if not scheduled:
            return scheduled
        # A token each is there for certain; some have more, for more than one was accepted.
        budget.tokens -= len(scheduled)
        if more > budget.tokens:
            scheduled = _shortened(scheduled, budget.tokens)
        budget.tokens -= min(more, budget.tokens)
        self._batch.page_budget.ratio.decay()
        return scheduled if covered else self._grow(scheduled)

    def _prefills(
        self, prefilling: Sequence[Request], budget: TokenBudget, now: float
    ) -> list[ScheduledRow]:
        """Prompts that are begun, and then those who wait."""
        scheduled: list[ScheduledRow] = []
        for request in prefilling:
            try:
                if request.table is None or not (pending := request.pending):
                    continue
                length = budget.prefill_chunk(request.planned, pending)
            except Exception as error:
                raise RequestFault(request) from error
            if not length:
                break
            budget.spend_prefill(length)
            scheduled.append((request, request.planned + length))
        if scheduled:
            scheduled = self._grow(scheduled)
        if len(self._waiting) and not self._pages_short:
            scheduled += self._admit(budget, now)
        return scheduled

    def _grow(self, scheduled: list[ScheduledRow]) -> list[ScheduledRow]:
        batch = self._batch
        return ensure_pages(
            scheduled, batch.page_budget, batch.slots, batch.running.values, self._retract_for_pages
        )

    def _retract_for_pages(self, request: Request) -> None:
        self.retracted_tokens += request.length
        self.retracted_prompt_tokens += request.prompt_tokens
        self.retract(request)
        self.retractions += 1
        self._pages_short = True
        self._batch.page_budget.ratio.retracted(self._batch.running.values())

    def _admit(self, budget: TokenBudget, now: float) -> list[ScheduledRow]:
        """Start those who wait, in order, until one of them does not fit."""
        scheduled: list[ScheduledRow] = []
        batch = self._batch
        if budget.full or not batch.slots.free_count:
            return scheduled
        reserved = batch.page_budget.reserved()
        for request in self._waiting.candidates(now, batch.prefix):
            if budget.full or not batch.slots.free_count:
                break
            try:
                if self._should_wait(request):
                    continue
                end = self._admit_one(request, reserved, budget, now)
            except Exception as error:
                raise RequestFault(request) from error
            if end is None:
                break
            reserved = batch.page_budget.reserved()
            scheduled.append((request, end))
        return scheduled

    def _admit_one(
        self, request: Request, reserved: Sequence[int], budget: TokenBudget, now: float
    ) -> int | None:
        """Start a waiting request, up to which of its tokens; None if it does not fit."""
        table = self._admissible(request, reserved)
        if table is None:
            return None
        try:
            length = budget.prefill_chunk(table.committed, request.length - table.committed)
            end = table.committed + length
            if not length or not self._batch.page_budget.allocate(table, end):
                table.release()
                return None
            budget.spend_prefill(length)
            self._start(request, table, now)
        except Exception:
            if request.table is not table:  # else it is released with the request
                table.release()
            raise
        return end

    def _should_wait(self, request: Request) -> bool:
        """Whether it cannot start yet, or is cheaper when somebody has computed what it shares."""
        if request.late:
            return True
        if request.urgent:
            return False
        return self._batch.prefix_sharing.should_wait(request, self._batch.cached_tokens)

    def _admissible(self, request: Request, reserved: Sequence[int]) -> PageTable | None:
        """A table with what is cached of a waiting request, if there is room for all of it."""
        if not self._fits(request, self._batch.shared_tokens(request), reserved):
            return None  # although what is cached counts as available here, and as needless too
        # The table holds what is cached before we count what is available: counted first, those
        # pages would pass for evictable and admit a request that cannot run.
        table = self._batch.cached_table(request)
        if self._fits(request, table.committed, reserved):
            return table
        table.release()
        return None

    def _fits(self, request: Request, cached_tokens: int, reserved: Sequence[int]) -> bool:
        room = self._batch.page_budget
        available, needed = room.available(), room.needed(request, cached_tokens)
        return fits(needed, reserved, available) or room.fits_known_lengths(request, available)

    def _start(self, request: Request, table: PageTable, now: float) -> None:
        self._waiting.admit(request, now)
        if request.started_s is None:
            self._timeouts.started(request, now)
            self._started.append(request)
        self._batch.start(request, table, now)

    def _preempt(self) -> None:
        """Take the pages of running requests for the next one, if it outranks them by enough."""
        batch = self._batch
        candidate = self._waiting.first() if self._rules.priority and batch.running else None
        if candidate is None or self._should_wait(candidate):
            return
        room = batch.page_budget
        needed = room.needed(candidate, batch.shared_tokens(candidate))
        sums = zip(needed, room.reserved(), room.available(), strict=True)
        short = [want + reserved - available for want, reserved, available in sums]
        if batch.slots.free_count and max(short) <= 0:
            return
        running = batch.running.values()
        for victim in choose_preempted(candidate, running, self._rules, short, room.reclaimable()):
            self.retract(victim)
            self.preemptions += 1


def _shortened(scheduled: Sequence[ScheduledRow], more: int) -> list[ScheduledRow]:
    """A token each, and `more` tokens beyond these for the first ones that have them."""
    shortened: list[ScheduledRow] = []
    for request, end in scheduled:
        first = request.planned + 1
        taken = min(end - first, more)
        more -= taken
        shortened.append((request, first + taken))
    return shortened
