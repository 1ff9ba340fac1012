"""The step planner: which requests wait, start, prefill, decode, or are retracted or preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from antiphon.model_worker.batching.faults import RequestFault
from antiphon.model_worker.batching.rows import NO_SLOTS, SlotSet
from antiphon.model_worker.batching.running_batch import RunningBatch, ScheduledRow, pages_needed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.prefixes import StateCheckpoints
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import EngineLimits, RequestMedia
    from antiphon.model_worker.batching.timeouts import Timeouts
    from antiphon.model_worker.batching.waiting_queue import QueueRules, WaitingQueue
    from antiphon.model_worker.cache.pages import PageTable
    from antiphon.model_worker.speculation.policy import Speculation

TOUCH_STEPS = 32
"""How many steps a touched prefix counts as recently used. Touching the prefixes of all waiting
requests in each step that evicts would cost as much as planning the step."""


class ScheduledRows(NamedTuple):
    """The rows of a step, before they are launched.

    Attributes:
        drafted: The drafts that rows verify, by slot; the others of `decodes` have none.
        counts: Drafts that a draft model is to make after rows, by slot; None: there is none.
    """

    decodes: SlotSet
    drafted: Mapping[int, Ints]
    chunks: list[ScheduledRow]
    counts: Mapping[int, int] | None = None


class StepPlanner:
    """Moves requests between the queue and their slots, and schedules the rows of the next plan."""

    def __init__(
        self,
        limits: EngineLimits,
        rules: QueueRules,
        batch: RunningBatch,
        waiting: WaitingQueue,
        timeouts: Timeouts,
        speculation: Speculation | None = None,
    ) -> None:
        self.retractions = 0  # because pages ran out; preemptions are for a higher priority
        self.retracted_tokens = 0
        self.retracted_prompt_tokens = 0
        self.preemptions = 0
        self._limits = limits
        self._rules = rules
        self._batch = batch
        self._pages = batch.page_budget
        self._waiting = waiting
        self._timeouts = timeouts
        self._speculation = speculation
        self._started: list[Request] = []
        self._decodes_due = False
        self._pages_short = False
        batch.page_budget.before_eviction = self._touch_waiting

    def schedule(self, now: float) -> ScheduledRows:
        """The rows of the next step. All have their pages."""
        batch = self._batch
        if not batch.running:
            self._pages.ratio.reset()
        self._pages_short = False
        batch.steps += 1
        self._preempt()
        alone = len(batch.running) + len(self._waiting) == 1
        checkpoints = batch.prefixes.checkpoints
        budget = TokenBudget(self._limits, batch.pools.page_tokens, checkpoints, alone=alone)
        decodes, chunks = NO_SLOTS, list[ScheduledRow]()
        if self._limits.mixed:
            decodes, chunks = self._decodes(budget), self._prefills(budget, now)
        elif self._decodes_due:
            decodes = self._decodes(budget)
            chunks = [] if len(decodes) else self._prefills(budget, now)
        else:
            chunks = self._prefills(budget, now)
            decodes = NO_SLOTS if chunks else self._decodes(budget)
        self._decodes_due = bool(chunks)
        if self._pages_short:  # some of these may have been retracted for others
            decodes = batch.still_running(decodes)
            chunks = [(request, end) for request, end in chunks if request.table is not None]
        if self._speculation is None:
            return ScheduledRows(decodes, {}, chunks)
        drafted = self._speculation.draft(batch, decodes, budget.tokens)
        if drafted:
            decodes = decodes.take(~np.isin(decodes.slots, [*drafted]))
        counts = self._speculation.draft_counts(batch, decodes, drafted, chunks)
        return ScheduledRows(decodes, drafted, chunks, counts)

    def take_started(self) -> Sequence[Request]:
        """Requests that were started for the first time since the last call."""
        if not self._started:
            return ()
        started, self._started = self._started, []
        return started

    def retract(self, request: Request) -> None:
        """Free slot and pages of a running request, and queue it again at its old position.

        Its tokens are inserted into the prefix cache, where it finds them unless they are evicted.
        """
        self._batch.cache_prefix(request)
        self._batch.release(request)
        request.retractions += 1
        self._waiting.put(request)

    def _touch_waiting(self) -> None:
        """Protect the cached prefixes of the next requests; the first one's most, so it is last.

        Only the candidates of a step are touched, which bounds the cost.
        """
        batch = self._batch
        for request in reversed(self._waiting.head()):
            if request.touched is None or batch.steps - request.touched >= TOUCH_STEPS:
                request.touched = batch.steps
                batch.index.touch(batch.prefixes.key_of(request))

    def _decodes(self, budget: TokenBudget) -> SlotSet:
        """All requests whose next token can be computed: none is left out, unless pages are."""
        batch = self._batch
        slots = batch.next_decodes()
        if self._speculation is not None:
            slots = self._speculation.ready(batch, slots, budget.tokens - len(slots))
        if not (count := len(slots)):
            return slots
        # It always has one for each, and for the drafts of a draft model.
        budget.tokens -= count
        if self._speculation is not None:
            budget.tokens -= int(batch.drafted[slots.at].sum())
        self._pages.ratio.decay()
        lacking = batch.short(slots).nonzero()[0]
        if not len(lacking):
            return slots
        short = slots.slots[lacking]
        if self._pages.ensure_free(batch.lacking(short)):
            batch.add_pages(short)
            return slots
        rows = [(slot, batch.scheduled_len.item(slot) + 1) for slot in short.tolist()]
        self._grow([(batch.running[slot], end) for slot, end in rows])
        slots = batch.still_running(slots)
        still_short = batch.short(slots)
        return slots.take(~still_short) if still_short.any() else slots

    def _prefills(self, budget: TokenBudget, now: float) -> list[ScheduledRow]:
        scheduled: list[ScheduledRow] = []
        for request in self._batch.prefills.values():
            try:
                start = self._batch.scheduled_len.item(request.slot)
                length = budget.prefill_chunk(start, request.length - start, request.media)
                end = self._batch.media.ready(request, start, start + length) if length else start
            except Exception as error:
                raise RequestFault(request) from error
            if not length:
                break
            if end == start:
                continue
            budget.spend_prefill(end - start)
            if request.aligned_at(end):
                budget.spend_alignment()
            scheduled.append((request, end))
        if scheduled:
            scheduled = self._grow(scheduled)
        if len(self._waiting) and not self._pages_short:
            scheduled += self._admit(budget, now)
        return scheduled

    def _grow(self, scheduled: list[ScheduledRow]) -> list[ScheduledRow]:
        """Allocate the pages of the rows; those that have them, in the same order.

        The oldest requests are served first, and others retracted if pages run out. A request that
        runs alone always fits, because `admission.check` saw to that, so at least one row remains.
        Where enough pages are pending free, because a launched plan may still read them, or the
        request's own launched rows hold states, no request is retracted: the row is left out of
        this plan.
        """
        short = [row for row in scheduled if not _covered(*row)]
        if not short:
            return scheduled
        if len(short) > 1:
            # One eviction for all: page by page it took longer than all else in a decode step.
            self._pages.ensure_free(pages_needed(short))
            short.sort(key=lambda row: row[0].arrival)
        for request, end in short:
            # The request may have been retracted itself, for an earlier row: then it has no table.
            while request.table is not None and not self._pages.allocate(request.table, end):
                if self._pages.pending_free(request.table.need(end)):
                    break
                if self._batch.pools.states and self._batch.has_launched(request):
                    break
                self._retract_for_pages(choose_victim(self._batch.running.values()))
            if _covered(request, end):
                self._batch.update(request)
        return [row for row in scheduled if _covered(*row)]

    def _retract_for_pages(self, request: Request) -> None:
        self.retracted_tokens += request.length
        self.retracted_prompt_tokens += request.prompt_tokens
        self.retract(request)
        self.retractions += 1
        self._pages_short = True
        self._pages.ratio.retracted(self._batch.running.values())

    def _admit(self, budget: TokenBudget, now: float) -> list[ScheduledRow]:
        scheduled: list[ScheduledRow] = []
        batch = self._batch
        if budget.full or not batch.free_count:
            return scheduled
        for request in self._waiting.candidates(now, batch.prefixes.cached):
            if budget.full or not batch.free_count:
                break
            try:
                if self._should_wait(request) or self._fetch(request, now):
                    continue
                end = self._admit_one(request, self._pages.reserved(), budget, now)
            except Exception as error:
                raise RequestFault(request) from error
            if end is None:
                break
            scheduled.append((request, end))
        return scheduled

    def _admit_one(
        self, request: Request, reserved: Sequence[int], budget: TokenBudget, now: float
    ) -> int | None:
        """Start a waiting request; the end of its first prefill chunk, None if it does not fit."""
        if (table := self._admissible(request, reserved)) is None:
            return None
        try:
            pending = request.length - table.committed
            length = budget.prefill_chunk(table.committed, pending, request.media)
            end = table.committed + length
            if self._batch.media.wait(request, table.committed):
                # Less of it is cached than when it was looked at.
                table.release()
                return None
            end = self._batch.media.ready(request, table.committed, end)
            if end == table.committed or not self._pages.allocate(table, end):
                table.release()
                return None
            budget.spend_prefill(end - table.committed)
            budget.spend_source()
            if request.aligned_at(end):
                budget.spend_alignment()
            self._start(request, table, now)
        except Exception:
            if request.table is not table:  # else it is released with the request
                table.release()
            raise
        return end

    def _should_wait(self, request: Request) -> bool:
        """Whether it cannot start yet, or should wait for another prefill of its prefix.

        Embeddings that it lacks are loaded from here on.
        """
        if request.stalled or request.fetching:
            return True
        prefixes, media = self._batch.prefixes, self._batch.media
        if not request.urgent and prefixes.should_wait(request):
            return True
        return request.media is not None and media.wait(request, prefixes.tokens(request))

    def _fetch(self, request: Request, now: float) -> bool:
        """Let a request wait for blocks of a page store, if enough of it may be there."""
        batch, transfers = self._batch, self._batch.transfers
        if transfers is None or request.urgent:
            return False
        cached, key = batch.prefixes.cached(request).length, batch.prefixes.key_of(request)
        if not transfers.worth(request, cached):
            return False
        if transfers.joined(request, key, cached):
            return True
        if (table := self._admissible(request, self._pages.reserved())) is None:
            return False
        try:
            worth = transfers.worth(request, table.committed)
            if worth and self._pages.allocate(table, transfers.fetch_end(request)):
                transfers.fetch(request, key, table, now)
                return True
        except Exception:
            table.release()
            raise
        table.release()
        return False

    def _admissible(self, request: Request, reserved: Sequence[int]) -> PageTable | None:
        """A table with the cached prefix of a waiting request, if all of the request fits."""
        shared = self._batch.prefixes.tokens(request)
        if not self._pages.fits(request, shared, reserved):
            return None  # although its cached pages count as available and as not needed here
        # The table must hold the cached pages before the available ones are counted: else these
        # would count as evictable, and a request that cannot run would be admitted.
        table = self._batch.prefixes.table(request)
        if not shared or self._pages.fits(request, table.committed, reserved):
            return table
        table.release()
        return None

    def _start(self, request: Request, table: PageTable, now: float) -> None:
        self._waiting.admit(request, now)
        if request.started_s is None:
            self._timeouts.started(request, now)
            self._started.append(request)
        self._batch.start(request, table, now)
        if self._speculation is not None:
            self._speculation.started(request.slot)

    def _preempt(self) -> None:
        batch, pages = self._batch, self._pages
        candidate = self._waiting.first() if self._rules.priority and batch.running else None
        if candidate is None or self._should_wait(candidate):
            return
        needed = pages.needed(candidate, batch.prefixes.tokens(candidate))
        sums = zip(needed, pages.reserved(), pages.available(), strict=True)
        short = [need + reserved - available for need, reserved, available in sums]
        if batch.free_count and max(short) <= 0:
            return
        running = batch.running.values()
        for victim in choose_preempted(candidate, running, self._rules, short, pages.reclaimable()):
            self.retract(victim)
            self.preemptions += 1


class TokenBudget:
    """The remaining tokens of one plan. Prefill chunks are requested in scheduling order.

    `alone`: there is one request, so that no other waits for a chunk.
    """

    def __init__(
        self,
        limits: EngineLimits,
        page_tokens: int,
        checkpoints: StateCheckpoints | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._limits = limits
        self._page_tokens = page_tokens
        self._checkpoints = checkpoints
        self._prefills = 0
        self._prefill_tokens = 0
        self._closed = False
        self._chunk_tokens = limits.chunk_tokens
        if alone and limits.chunk_tokens is not None and limits.alone_tokens is not None:
            self._chunk_tokens = limits.alone_tokens
        self.tokens = limits.step_tokens_max

    @property
    def full(self) -> bool:
        """Whether no further prefill joins the plan."""
        limits = self._limits
        return (
            self.tokens <= 0
            or self._closed
            or (limits.prefill_max is not None and self._prefills >= limits.prefill_max)
            or (limits.fill_tokens is not None and self._prefill_tokens >= limits.fill_tokens)
        )

    def prefill_chunk(self, start: int, pending: int, media: RequestMedia | None = None) -> int:
        """Length of the prefill chunk at `start`, of `pending` tokens left; 0: none fits.

        A chunk ends at a page border where it can, so that the page can be shared at once, and at
        checkpoints of recurrent states. It does not end within an image whose tokens attend to each
        other.
        """
        if self.full:
            return 0
        available = self.tokens
        if self._prefills and self._limits.fill_tokens is not None:
            # The first prefill may be longer than `fill_tokens`.
            available = min(available, self._limits.fill_tokens - self._prefill_tokens)
        if self._chunk_tokens is None:
            return pending if pending <= available or not self._prefills else 0
        length = min(pending, self._chunk_tokens, available)
        if self._checkpoints is not None:
            length = min(length, self._checkpoints.stop(start, start + pending) - start)
        whole = min(self._chunk_tokens, available)
        if length < pending:
            to_border = max(0, length - (start + length) % self._page_tokens)
            # The first prefill advances even if a page does not fit in a plan.
            length = to_border if to_border or self._prefills else length
        if media is None or self._limits.span_tokens is None:
            return length
        return self._around(media, start, length, whole)

    def _around(self, media: RequestMedia, start: int, length: int, whole: int) -> int:
        """The length of a chunk that would end within an image, up to `whole`: before or behind it.

        An image that does not fit beside what is planned lets no later prefill pass: else decodes
        that follow each other could keep it waiting.
        """
        for first, last in media.spans:
            if first < start + length < last or (start + length == first == start):
                if first > start:
                    return first - start
                if last - start <= whole:
                    return last - start
                self._closed = True
                return 0
        return length

    def spend_prefill(self, tokens: int) -> None:
        self.tokens -= tokens
        self._prefills += 1
        self._prefill_tokens += tokens

    def spend_source(self) -> None:
        """Count what a request that starts attends to beside its text, of a model with such.

        Its rows are tokens of this plan for the time and the memory that they take, though of few
        matrices: a step of many would hold up all decodes. Where they are more than there is left,
        the request is the last to start.
        """
        if self._limits.source_shape is not None:
            self.tokens = max(0, self.tokens - self._limits.source_shape[0])

    def spend_alignment(self) -> None:
        """Let no later prefill join: a plan aligns one prompt, of which all is computed once more.

        Prompts whose tokens are cached end in a plan in any number, and the decodes of that plan
        would wait for the passes of all.
        """
        self._closed = True


def choose_victim(running: Iterable[Request]) -> Request:
    """The request that is retracted when pages run out.

    Urgent requests stay, then those of higher priority; of equals the one is chosen that loses
    least by starting over: fewest outputs, then the latest arrival.
    """
    return min(
        running,
        key=lambda request: (
            request.urgent,
            -request.rank,
            request.outputs_count,
            -request.arrival,
        ),
    )


def choose_preempted(
    candidate: Request,
    running: Iterable[Request],
    rules: QueueRules,
    short: Sequence[int],
    reclaimable: Callable[[Request], Sequence[int]],
) -> list[Request]:
    """The running requests to preempt for a waiting one whose priority is enough higher.

    The lowest priority first, then the latest arrival. None is preempted in vain: if all of them
    together do not free the pages by group that the candidate is `short` of, the result is empty.
    """
    weakest = [
        request
        for request in running
        if not request.urgent and rules.preempts(candidate.rank, request.rank)
    ]
    weakest.sort(key=lambda request: (-request.rank, -request.arrival))
    missing = list(short)
    for count, victim in enumerate(weakest, start=1):
        missing = [lack - gain for lack, gain in zip(missing, reclaimable(victim), strict=True)]
        if max(missing) <= 0:
            return weakest[:count]
    return []


def _covered(request: Request, end: int) -> bool:
    return request.table is not None and request.table.covers(end)
