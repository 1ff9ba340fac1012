"""The choice of what is computed next: who goes on, who starts and who gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.batching.budget import Budget
from antiphon.model_worker.batching.decode import Want, grow, needs
from antiphon.model_worker.batching.faults import RequestFault
from antiphon.model_worker.batching.retraction import choose_preempted
from antiphon.model_worker.batching.room import fits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.admission import Limits
    from antiphon.model_worker.batching.holdings import Holdings
    from antiphon.model_worker.batching.policy import Rules
    from antiphon.model_worker.batching.queue import WaitingQueue
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.timeouts import Timeouts
    from antiphon.model_worker.cache.table import PageTable


TOUCH_STEPS = 32
"""How long a touched prefix is safe enough: what was of use later is evicted later. Touching all
that wait in each step that evicts would cost as much as planning it does."""


class Planner:
    """Moves requests between the queue and their slots, and says who has a row in the next plan.

    Attributes:
        retractions: Requests that lost their pages because none were left, since start.
        retracted_tokens: Tokens that these had in the cache.
        retracted_prompt_tokens: Of those, the prompts'.
        preemptions: Requests that lost their pages to one that outranks them, since start.
    """

    def __init__(
        self,
        limits: Limits,
        rules: Rules,
        holdings: Holdings,
        waiting: WaitingQueue,
        timeouts: Timeouts,
    ) -> None:
        self.retractions = 0
        self.retracted_tokens = 0
        self.retracted_prompt_tokens = 0
        self.preemptions = 0
        self._limits = limits
        self._rules = rules
        self._holdings = holdings
        self._waiting = waiting
        self._timeouts = timeouts
        self._started: list[Request] = []
        self._decodes_due = False
        self._pages_short = False
        self._steps = 0
        holdings.room.before_eviction = self._touch_waiting

    def wants(self, now: float) -> list[Want]:
        """Whose tokens are computed next, and up to which. They have the pages for it.

        Whoever had to give way for a later one is among them too, and has no slot any more.
        """
        holdings = self._holdings
        if not holdings.running:
            holdings.room.ratio.reset()
        self._pages_short = False
        self._steps += 1
        self._preempt()
        budget = Budget(self._limits, holdings.pools.page_tokens, holdings.checkpoints)
        # Some of these may give way to others while these are chosen: they have no table then.
        answering: list[Request] = []
        begun: list[Request] = []
        for request in holdings.running.values():
            (answering if request.answers else begun).append(request)
        if self._limits.mixed:
            return self._decodes(answering, budget) + self._prompts(begun, budget, now)
        if self._decodes_due:
            wants = self._decodes(answering, budget) or self._prompts(begun, budget, now)
        else:
            wants = self._prompts(begun, budget, now) or self._decodes(answering, budget)
        self._decodes_due = any(not request.answers for request, _ in wants)
        return wants

    def extend(self, wants: Sequence[Want]) -> bool:
        """Give running requests the pages of their next rows, unless somebody had to give way."""
        if not self._holdings.room.find(needs(wants)):
            return False
        for request, end in wants:
            assert request.table is not None, "a running request has no pages"
            request.table.allocate(end)
            self._holdings.slots.update(request)
        return True

    def pass_over(self, steps: int) -> None:
        """So many steps of decodes went well without a question."""
        self._steps += steps
        for _ in range(steps):
            self._holdings.room.ratio.decay()

    @property
    def new_token_ratio(self) -> float:
        """Share of the longest answers for which pages are kept free."""
        return self._holdings.room.ratio.value

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
        self._holdings.share(request)
        self._holdings.release(request)
        request.retract()
        self._waiting.put(request)

    def _touch_waiting(self) -> None:
        """Keep what the next ones will find; the first of them longest, so it is touched last.

        As many are looked at as for a common beginning, so that the cost has a bound.
        """
        for request in reversed(self._waiting.ahead()):
            if request.touched is None or self._steps - request.touched >= TOUCH_STEPS:
                request.touched = self._steps
                self._holdings.touch(request)

    def _decodes(self, answering: Sequence[Request], budget: Budget) -> list[Want]:
        """Everybody who has begun to answer: nobody is ever left out."""
        wants: list[Want] = []
        more, covered = 0, True
        for request in answering:
            table = request.table
            try:
                if table is not None and (tokens := request.pending):
                    end = request.planned + tokens
                    wants.append((request, end))
                    more += tokens - 1
                    covered = covered and table.covers(end)
            except Exception as error:
                raise RequestFault(request) from error
        if not wants:
            return wants
        # A token each is there for certain; some have more, for more than one was accepted.
        budget.tokens -= len(wants)
        if more > budget.tokens:
            wants = _shortened(wants, budget.tokens)
        budget.tokens -= min(more, budget.tokens)
        self._holdings.room.ratio.decay()
        return wants if covered else self._grow(wants)

    def _prompts(self, begun: Sequence[Request], budget: Budget, now: float) -> list[Want]:
        """Prompts that are begun, and then those who wait."""
        wants: list[Want] = []
        for request in begun:
            try:
                if request.table is None or not (pending := request.pending):
                    continue
                length = budget.chunk(request.planned, pending)
            except Exception as error:
                raise RequestFault(request) from error
            if not length:
                break
            budget.spend_prompt(length)
            wants.append((request, request.planned + length))
        if wants:
            wants = self._grow(wants)
        if len(self._waiting) and not self._pages_short:
            wants += self._admit(budget, now)
        return wants

    def _grow(self, wants: list[Want]) -> list[Want]:
        holdings = self._holdings
        return grow(wants, holdings.room, holdings.slots, holdings.running.values, self._give_way)

    def _give_way(self, request: Request) -> None:
        self.retracted_tokens += request.length
        self.retracted_prompt_tokens += request.prompt_tokens
        self.retract(request)
        self.retractions += 1
        self._pages_short = True
        self._holdings.room.ratio.retracted(self._holdings.running.values())

    def _admit(self, budget: Budget, now: float) -> list[Want]:
        """Start those who wait, in order, until one of them does not fit."""
        wants: list[Want] = []
        holdings = self._holdings
        if budget.full or not holdings.slots.free_count:
            return wants
        promised = holdings.room.promised()
        for request in self._waiting.candidates(now, holdings.prefix):
            if budget.full or not holdings.slots.free_count:
                break
            try:
                if self._better_later(request):
                    continue
                end = self._admit_one(request, promised, budget, now)
            except Exception as error:
                raise RequestFault(request) from error
            if end is None:
                break
            promised = holdings.room.promised()
            wants.append((request, end))
        return wants

    def _admit_one(
        self, request: Request, promised: Sequence[int], budget: Budget, now: float
    ) -> int | None:
        """Start a waiting request, up to which of its tokens; None if it does not fit."""
        table = self._admissible(request, promised)
        if table is None:
            return None
        try:
            length = budget.chunk(table.committed, request.length - table.committed)
            end = table.committed + length
            if not length or not self._holdings.room.take(table, end):
                table.release()
                return None
            budget.spend_prompt(length)
            self._start(request, table, now)
        except Exception:
            if request.table is not table:  # else it is released with the request
                table.release()
            raise
        return end

    def _better_later(self, request: Request) -> bool:
        """Whether it cannot start yet, or is cheaper when somebody has computed what it shares."""
        if request.late:
            return True
        if request.urgent:
            return False
        return self._holdings.sharing.holds(request, self._holdings.cached_tokens)

    def _admissible(self, request: Request, promised: Sequence[int]) -> PageTable | None:
        """A table with what is cached of a waiting request, if there is room for all of it."""
        if not self._fits(request, self._holdings.shared_tokens(request), promised):
            return None  # although what is cached counts as available here, and as needless too
        # The table holds what is cached before we count what is available: counted first, those
        # pages would pass for evictable and admit a request that cannot run.
        table = self._holdings.table(request)
        if self._fits(request, table.committed, promised):
            return table
        table.release()
        return None

    def _fits(self, request: Request, cached_tokens: int, promised: Sequence[int]) -> bool:
        room = self._holdings.room
        available, wanted = room.available(), room.wanted(request, cached_tokens)
        return fits(wanted, promised, available) or room.packs(request, available)

    def _start(self, request: Request, table: PageTable, now: float) -> None:
        self._waiting.admit(request, now)
        if request.started_s is None:
            self._timeouts.started(request, now)
            self._started.append(request)
        self._holdings.start(request, table, now)

    def _preempt(self) -> None:
        """Take the pages of running requests for the next one, if it outranks them by enough."""
        holdings = self._holdings
        candidate = self._waiting.first() if self._rules.priority and holdings.running else None
        if candidate is None or self._better_later(candidate):
            return
        room = holdings.room
        wanted = room.wanted(candidate, holdings.shared_tokens(candidate))
        sums = zip(wanted, room.promised(), room.available(), strict=True)
        short = [want + promised - available for want, promised, available in sums]
        if holdings.slots.free_count and max(short) <= 0:
            return
        running = holdings.running.values()
        for victim in choose_preempted(candidate, running, self._rules, short, room.gains()):
            self.retract(victim)
            self.preemptions += 1


def _shortened(wants: Sequence[Want], more: int) -> list[Want]:
    """A token each, and `more` tokens beyond these for the first ones that have them."""
    shortened: list[Want] = []
    for request, end in wants:
        first = request.planned + 1
        taken = min(end - first, more)
        more -= taken
        shortened.append((request, first + taken))
    return shortened
