"""Speculative decoding: which running requests get draft tokens, and how many."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from antiphon.model_worker.batching.faults import RequestFault
from antiphon.model_worker.batching.plan import NO_IDS, draft
from antiphon.model_worker.batching.token_masks import looks_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.rows import SlotSet
    from antiphon.model_worker.batching.running_batch import RunningBatch, ScheduledRow

ACCEPTANCE_START = 0.7
"""Assumed probability that a draft is right, before any of a request was verified."""
_WEIGHT = 0.15
"""Weight of the newest draft in the running acceptance of a request."""
_RECOVERY = 0.01
"""How far the acceptance of a request without drafts returns to the start in a step: it gets some
again after a while, since text that repeats may come later."""


class Drafter(Protocol):
    """Guesses how the output of a request continues."""

    def propose(self, request: Request, drafts_max: int) -> Ints:
        """Return up to so many tokens that may follow the known ones; often none."""
        ...

    def ended(self, request: Request) -> None:
        """Forget what is kept for a request."""
        ...


class StepCosts(msgspec.Struct, frozen=True):
    """Seconds of a decode step by its number of tokens, measured at start.

    Attributes:
        tokens: Ascending, at least two.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, tokens: int) -> float:
        """Seconds of a step of so many tokens, between or beyond those that were measured."""
        last = len(self.tokens) - 1
        at = min(int(np.searchsorted(self.tokens, tokens, side="right")), last)
        first, second = self.tokens[at - 1], self.tokens[at]
        slope = (self.seconds[at] - self.seconds[at - 1]) / (second - first)
        return self.seconds[at - 1] + slope * (tokens - first)


class DraftCounts(msgspec.Struct):
    """Counted since start: verify rows, their drafts, and those that were right."""

    rows: int = 0
    proposed: int = 0
    accepted: int = 0


class Speculation:
    """Chooses drafts for the decodes of a step.

    A request gets drafts if all its tokens are known: its row is verified as a whole, and the
    tokens that it accepts are those that it would have sampled one by one. Where steps are launched
    ahead, a request for which there will probably be drafts waits for its tokens in flight.

    Without a `drafter` the runner makes the drafts, by a draft model. It knows what the host does
    not know yet, so no request waits.

    How many follows what a step costs and how many drafts were right: one more as long as the step
    is expected to yield more tokens a second with it. Without `costs`, as many as there are. Every
    row gets `fixed` ones, if that is set, to measure steps with.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        drafts_max: int,
        slots_max: int,
        costs: StepCosts | None = None,
    ) -> None:
        self.drafter = drafter
        self.costs = costs
        self.counts = DraftCounts()
        self.drafts_max = drafts_max
        self.fixed: int | None = None
        self._acceptance = np.full(slots_max, ACCEPTANCE_START)  # (S,)

    def reset(self) -> None:
        """Forget what was verified so far."""
        self.counts = DraftCounts()
        self._acceptance[:] = ACCEPTANCE_START

    def started(self, slot: int) -> None:
        """Note that another request has a slot."""
        self._acceptance[slot] = ACCEPTANCE_START

    def ended(self, request: Request) -> None:
        if self.drafter is not None:
            self.drafter.ended(request)

    def verified(self, slot: int, drafted: int, right: int) -> None:
        """Note how many of the drafts of a request were right."""
        self.counts.rows += 1
        self.counts.proposed += drafted
        self.counts.accepted += right
        tried = min(drafted, right + 1)  # what follows a wrong one says nothing
        kept = (1 - _WEIGHT) ** tried
        found = right / tried
        self._acceptance[slot] = kept * self._acceptance[slot] + (1 - kept) * found

    def ready(self, batch: RunningBatch, slots: SlotSet, tokens_max: int) -> SlotSet:
        """The slots without those that wait for their tokens in flight, to get drafts after them.

        `tokens_max` is the maximum number of drafts in all.
        """
        in_flight = batch.in_flight_tokens[slots.at]
        if self.drafter is None or not np.count_nonzero(in_flight):
            return slots
        ready = np.ones(len(slots), np.bool_)
        decoding = slots.slots.tolist()
        lengths = self._lengths(decoding, len(slots), tokens_max)
        for row in np.flatnonzero(in_flight).tolist():
            request = batch.running[decoding[row]]
            try:
                ready[row] = not self._foresees(
                    self.drafter, request, in_flight.item(row), lengths[row]
                )
            except Exception as error:
                raise RequestFault(request) from error
        return slots.take(ready)

    def draft(self, batch: RunningBatch, slots: SlotSet, tokens_max: int) -> dict[int, Ints]:
        """Drafts by slot, of at most so many tokens in all; their rows have pages for them."""
        if self.drafter is None:
            return self._drafted(batch, slots, tokens_max)
        decoding = slots.slots.tolist()
        lengths = self._lengths(decoding, len(slots), tokens_max)
        drafted: dict[int, Ints] = {}
        for slot, length in zip(decoding, lengths, strict=True):
            request, drafts = batch.running[slot], NO_IDS
            try:
                if not batch.in_flight_tokens[slot]:
                    drafts = self._drafts(self.drafter, batch, request, length)
            except Exception as error:
                raise RequestFault(request) from error
            if len(drafts):
                drafted[slot] = drafts
            else:
                self._acceptance[slot] += _RECOVERY * (ACCEPTANCE_START - self._acceptance[slot])
        return drafted

    def _foresees(self, drafter: Drafter, request: Request, in_flight: int, count: int) -> bool:
        """Whether there are drafts after those that stand for the tokens in flight."""
        if self.fixed is not None:
            return self.fixed > 0
        if count <= 0 or looks_back(request.state.sampling.processors):
            return False
        return len(drafter.propose(request, in_flight + count)) > in_flight

    def _drafted(self, batch: RunningBatch, slots: SlotSet, tokens_left: int) -> dict[int, Ints]:
        """The drafts that the runner has made or will have made, as placeholders.

        `tokens_left` of the step is negative if some must be dropped, for requests that came since.
        """
        drafted: dict[int, Ints] = {}
        for slot in slots.slots[batch.drafted[slots.at] > 0].tolist():
            count, end = batch.drafted.item(slot), batch.scheduled_len.item(slot) + 1
            if tokens_left < 0:
                tokens_left += count
            elif self._fits(batch, batch.running[slot], end + count, 1 + count):
                drafted[slot] = np.full(count, draft(slot), np.int32)
                continue
            batch.drafted[slot] = 0
            batch.trim(batch.running[slot])
        return drafted

    def draft_counts(
        self,
        batch: RunningBatch,
        decodes: SlotSet,
        drafted: Mapping[int, Ints],
        chunks: Sequence[ScheduledRow],
    ) -> dict[int, int] | None:
        """How many drafts a draft model is to make after each row that samples, by slot.

        The next row of the slot has pages for them, whatever of this one is right.
        """
        if self.drafter is not None:
            return None
        ends = {slot: batch.scheduled_len.item(slot) + 1 for slot in decodes.slots.tolist()}
        ends |= {
            slot: batch.scheduled_len.item(slot) + 1 + len(ids) for slot, ids in drafted.items()
        }
        ends |= {
            request.slot: end
            for request, end in chunks
            if end == request.length and not request.scores
        }
        decoding, again = batch.decoding, np.array(list(ends), np.int32)
        others = int(batch.drafted[decoding.at].sum() - batch.drafted[again].sum())
        left = batch.step_tokens_max - len(batch.running) - others
        counts: dict[int, int] = {}
        for (slot, end), length in zip(
            ends.items(), self._lengths(list(ends), len(ends), left), strict=True
        ):
            request = batch.running[slot]
            count = self._count(batch, request, end + 1, length)
            if count > 0 and self._fits(batch, request, end + 1 + count, 1):
                counts[slot] = count
            else:
                self._acceptance[slot] += _RECOVERY * (ACCEPTANCE_START - self._acceptance[slot])
        return counts

    def _count(self, batch: RunningBatch, request: Request, length: int, count: int) -> int:
        """At most `count` drafts after so many tokens of a request."""
        if looks_back(request.state.sampling.processors):
            return 0  # a processor that counts tokens cannot look ahead
        count = min(count, request.tokens_max - length - 1)
        if (points := batch.prefixes.checkpoints) is not None:  # a state is cached where it is due
            count = min(count, -length % points.every)
        return count

    def _lengths(self, slots: Sequence[int], rows: int, tokens_max: int) -> list[int]:
        """How many drafts pay for each of these slots, in a step of so many rows.

        The likeliest draft is added first, while it raises the expected tokens a second.
        """
        if self.fixed is not None:
            return [self.fixed] * len(slots)
        if self.costs is None:
            return [min(self.drafts_max, tokens_max // max(1, len(slots)))] * len(slots)
        lengths = [0] * len(slots)
        rates = self._acceptance[slots]
        heap = [(-rate, index) for index, rate in enumerate(rates.tolist())]
        heapq.heapify(heap)
        expected, tokens = float(rows), rows
        seconds = self.costs.of(tokens)
        while heap and tokens - rows < tokens_max:
            likelihood, index = heapq.heappop(heap)
            more = self.costs.of(tokens + 1)
            if (expected - likelihood) * seconds <= expected * more:
                break
            expected, tokens, seconds = expected - likelihood, tokens + 1, more
            lengths[index] += 1
            if lengths[index] < self.drafts_max:
                heapq.heappush(heap, (likelihood * rates.item(index), index))
        return lengths

    def _drafts(self, drafter: Drafter, batch: RunningBatch, request: Request, count: int) -> Ints:
        length = request.length
        count = self._count(batch, request, length, count)
        if count <= 0:
            return NO_IDS
        drafts = (
            drafter.propose(request, count) if self.fixed is None else np.zeros(count, np.int32)
        )
        if len(drafts) and request.matcher is not None:
            drafts = drafts[: request.matcher.propose(drafts.tolist())]
        fits = self._fits(batch, request, length + len(drafts), 1 + len(drafts))
        return drafts if fits else NO_IDS

    def _fits(self, batch: RunningBatch, request: Request, tokens: int, states: int) -> bool:
        """Whether a request has pages up to a token and so many states, or free ones for these."""
        table = request.table
        assert table is not None, "a running request has no pages"
        if table.covers(tokens, states):
            return True
        if not batch.page_budget.has_free(table.need(tokens, states)):
            return False
        table.allocate(tokens, states)
        batch.update(request)
        return True
