"""A runner whose next token is a hash of what it reads from its pages."""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from antiphon.model_worker.batching.flights import Drafting
from antiphon.model_worker.batching.plan import (
    Flags,
    Ints,
    PlanRunner,
    RowStatus,
    SamplingPart,
    StepOutcome,
    StepPlan,
    draft,
    future,
)
from antiphon.model_worker.batching.slot_tables import SlotTables
from antiphon.model_worker.cache.groups import UNKNOWN_STATE, CacheGroup, GroupKind
from antiphon.wire.base import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from threading import Thread


both = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
"""Steps one after the other, and steps launched before the one before them is read."""


def next_token(
    context: Sequence[int] | Ints,
    windows: Sequence[int | None],
    seed: int,
    choice: int,
    vocab_size: int,
    counted: Sequence[int] = (),
) -> int:
    """The token after `context`: what a group with a window sees of it is hashed by itself.

    `counted` are the tokens to which penalties apply, in any order.
    """
    digest = blake2b(f"{seed},{choice},{len(context)}".encode(), digest_size=8)
    if counted:
        digest.update(np.array(sorted(counted), np.int32).tobytes())
    ids = np.ascontiguousarray(context, np.int32)
    for window in windows:
        digest.update((ids if window is None else ids[-window:]).tobytes())
    return int.from_bytes(digest.digest(), "little") % vocab_size


def answer_alone(
    context: Sequence[int],
    longest: int,
    ends: Container[int],
    vocab_size: int,
    *,
    windows: Sequence[int | None] = (None,),
    seed: int = 0,
    choice: int = 0,
    counted: Sequence[int] | None = None,
) -> tuple[list[int], FinishReason]:
    """What a choice answers by itself: tokens up to one of `ends`, or so many.

    With penalties `counted` are those of the context that it has said.
    """
    ids: list[int] = []
    known = np.zeros(len(context) + max(0, longest), np.int32)
    known[: len(context)] = context
    for length in range(len(context), len(known)):
        said = [] if counted is None else [*counted, *ids]
        token = next_token(known[:length], windows, seed, choice, vocab_size, said)
        if token in ends:
            return ids, FinishReason.STOP
        known[length] = token
        ids.append(token)
    return ids, FinishReason.LENGTH


def group_of(plan: StepPlan, row: int) -> int:
    """The attention group of a row."""
    if plan.group_rows is None:
        return 0
    return int(np.searchsorted(plan.group_rows, row, side="right")) - 1


class HashRunner:
    """Keeps token ids where a model keeps keys and values; a state is all ids that it was made of.

    A plan with a wrong page or length therefore gives other tokens than the request
    would have got alone. With penalties so does a token that is not counted, or twice.
    """

    def __init__(self, groups: Sequence[CacheGroup], vocab_size: int) -> None:
        self.groups = groups
        self.vocab_size = vocab_size
        self.windows = [group.window for group in groups if group.kind is not GroupKind.DRAFT]
        self.poisoned: Callable[[StepPlan, int], bool] = lambda _plan, _row: False
        self.tables = SlotTables(groups)
        self.plans = 0
        self._pages = [np.full((g.pages_total, g.page_tokens), -1, np.int32) for g in groups]
        self._states: dict[tuple[int, int], Ints] = {}
        # The tokens that penalties count, by slot; none before a plan that failed has begun to.
        self._counted = defaultdict[int, list[int]](list)
        self._last: dict[int, int] = {}  # the last token that each slot drew
        self._ends: dict[int, int] = {}  # where the last row of each slot has ended
        self._current: dict[tuple[int, int], int] = {}  # state after it, by group and slot
        self._drafts: dict[int, list[int]] = {}
        self.followed = self.drafted = 0  # rows whose places were not known, and drafts made
        self.rows = self.tokens = 0  # of all plans
        self.futures = 0  # tokens that were not known when their plan was made

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        """Write the plan's tokens into their pages and draw from what the pages hold then."""
        assert plan.step == self.plans + 1, "a step is missing"
        self.plans += 1
        self.rows += len(plan.slot)
        self.tokens += len(plan.tokens)
        plan = self._known(self.tables.fill(plan))
        ends = np.cumsum(plan.query_len)
        rows = np.searchsorted(ends, plan.logit_tokens, side="right")
        logits = np.bincount(rows, minlength=len(ends))
        bounds = pairwise([0, *np.cumsum(logits).tolist()])
        wanted = [range(first, last) for first, last in bounds]
        count, kinds = len(plan.slot), range(len(self.groups))
        written = [[self._context(plan, row, group) for group in kinds] for row in range(count)]
        try:
            self.before_sampling()
        except Exception:
            self._note_failure(plan, np.where(logits > 1, 1, plan.query_len))
            raise
        if plan.part is None:
            assert part is not None, "a plan without a sampling part"
            plan = msgspec.structs.replace(plan, part=part())
        penalised = self._begin_counts(plan)
        accepted: list[list[int]] = []
        status: list[RowStatus] = []
        for row, contexts in enumerate(written):
            status.append(RowStatus.NON_FINITE if self.poisoned(plan, row) else RowStatus.OK)
            draws = bool(wanted[row]) and status[-1] is RowStatus.OK
            accepted.append(self._draw(plan, row, contexts, wanted[row]) if draws else [])
            if row in penalised:
                self._counted[int(plan.slot[row])] += accepted[-1]
            self._last[int(plan.slot[row])] = accepted[-1][-1] if accepted[-1] else 0
        counts = np.array([len(ids) for ids in accepted], np.int32)
        computed = np.where(logits > 1, counts, plan.query_len)
        computed = np.where(np.array(status) == RowStatus.OK, computed, 0).astype(np.int32)
        self._note(plan, accepted, computed)
        return StepOutcome(
            step=plan.step,
            starts=np.cumsum([0, *counts], dtype=np.int32),
            token_ids=np.array([token for ids in accepted for token in ids], np.int32),
            status=np.array(status, np.int32),
            computed=computed,
            plan=None if plan.draft_counts is None else plan,
        )

    def before_sampling(self) -> None:
        """May raise: nothing is known then of where the rows of a plan have ended."""

    def _note_failure(self, plan: StepPlan, computed: Ints) -> None:
        """Note where rows end that count for nothing: plans that rest on them are computed, too."""
        for slot in plan.slot.tolist():
            self._last[slot] = 0
        self._note(plan, [[] for _ in plan.slot], computed)
        self.drop_drafts()

    def drop_drafts(self) -> None:
        """Forget the drafts of the last plan."""
        for slot in self._read[0].slot.tolist():
            self._drafts[slot] = []

    def _known(self, plan: StepPlan) -> StepPlan:
        """With the places of rows that follow, and the tokens that were not known."""
        if plan.future_start is not None:
            plan = self._placed(plan, plan.future_start)
        unknown = np.flatnonzero(plan.tokens < 0)
        if not len(unknown):
            return plan
        tokens = plan.tokens.copy()
        rows = np.searchsorted(plan.query_start, unknown, side="right") - 1
        for index, row in zip(unknown.tolist(), rows.tolist(), strict=True):
            token, slot = int(tokens[index]), int(plan.slot[row])
            if token == draft(slot):
                number, drafts = index - int(plan.query_start[row]), self._drafts.get(slot, [])
                tokens[index] = drafts[number - 1] if number <= len(drafts) else 0
            else:
                # A slot whose step failed has drawn nothing: this plan will count for nothing.
                tokens[index] = self._last.get(-1 - token, 0)
                self.futures += 1
        return msgspec.structs.replace(plan, tokens=tokens)

    def _note(self, plan: StepPlan, accepted: list[list[int]], computed: Ints) -> None:
        """Note where each row has ended, and in which states."""
        self._read = plan, accepted, computed
        for row, slot in enumerate(plan.slot.tolist()):
            # Of a row that fails nothing counts, nor what follows it.
            end = int(plan.kv_len[row] - plan.query_len[row] + max(1, computed[row]))
            self._ends[slot] = end
            for group, table in enumerate(plan.page_tables):
                if self.groups[group].kind is GroupKind.STATE:
                    writes = table[row, 1:][table[row, 1:] >= 0]
                    several = len(writes) > 1
                    self._current[group, slot] = int(writes[max(0, computed[row] - 1) * several])

    def _placed(self, plan: StepPlan, future_start: Flags) -> StepPlan:
        """With each row of a future start where the row before it in its slot has ended."""
        kv_len = plan.kv_len.copy()
        tables = [table.copy() for table in plan.page_tables]
        for row in np.flatnonzero(future_start).tolist():
            slot = int(plan.slot[row])
            end = self._ends[slot] + int(plan.query_len[row])
            assert end <= kv_len[row], "a row is longer than the most that it can be"
            self.followed += 1
            kv_len[row] = end
            for group, table in enumerate(tables):
                if table[row, 0] == UNKNOWN_STATE:
                    table[row, 0] = self._current[group, slot]
        return msgspec.structs.replace(
            plan, kv_len=kv_len, page_tables=tuple(tables), future_start=None
        )

    def make_drafts(self) -> Ints:
        """Read what the last plan computed into the draft pages, and draft what follows."""
        plan, accepted, computed = self._read
        counts = plan.draft_counts
        assert counts is not None, "the last plan asks for no drafts"
        drafts = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
        for row, slot in enumerate(plan.slot.tolist()):
            if not computed[row]:
                continue
            start = int(plan.kv_len[row] - plan.query_len[row])
            begin = int(plan.query_start[row])
            ids = plan.tokens[begin : begin + computed[row]].tolist()
            count = int(counts[row]) if accepted[row] else 0
            if count:
                ids.append(accepted[row][-1])
            for number in range(max(1, count)):
                context = self._write_draft(plan, row, start, ids)
                if not count:
                    break
                seed = (int(plan.sampling.seed[row]), int(plan.sampling.choice[row]))
                guess = next_token(context, self.windows, *seed, self.vocab_size)
                wrong = (guess + len(context)) % 3 == 0  # so that one in three is not right
                drafts[row, number] = (guess + wrong) % self.vocab_size
                ids.append(int(drafts[row, number]))
            self._drafts[slot] = drafts[row].tolist()
            self.drafted += count
        return drafts

    def _write_draft(self, plan: StepPlan, row: int, start: int, ids: list[int]) -> list[int]:
        """Write ids from `start` on into the draft pages; all that the pages hold up to there."""
        group = len(self.groups) - 1
        page_tokens, table = self.groups[group].page_tokens, plan.page_tables[group][row]
        places = np.arange(start + len(ids))
        pages = table[places // page_tokens]
        assert (pages >= 0).all(), "a draft has no page"
        fresh = slice(start, None)
        self._pages[group][pages[fresh], places[fresh] % page_tokens] = ids
        return self._pages[group][pages, places % page_tokens].tolist()

    def _begin_counts(self, plan: StepPlan) -> Ints:
        """Reset what penalties count, where a plan says so; the rows with penalties."""
        assert plan.part is not None, "a plan samples without its sampling part"
        if (penalties := plan.part.penalties) is None:
            return np.zeros(0, np.int32)
        bounds = pairwise(penalties.begun_starts.tolist())
        for slot, (start, end) in zip(penalties.begun.tolist(), bounds, strict=True):
            self._counted[slot] = penalties.begun_ids[start:end].tolist()
        return penalties.rows

    def _context(self, plan: StepPlan, row: int, group: int) -> Ints:
        """Write the row's tokens into one group's pages; return all that its last query sees."""
        if self.groups[group].kind is GroupKind.STATE:
            return self._advance(plan, row, group)
        if self.groups[group].kind is GroupKind.DRAFT:
            return self._context(plan, row, 0)  # they are written after it
        page_tokens, window = self.groups[group].page_tokens, self.groups[group].window
        table, kv_len = plan.page_tables[group][row], int(plan.kv_len[row])
        begin, length = int(plan.query_start[row]), int(plan.query_len[row])
        # A verify row's first query looks back further than its last.
        first = 0 if window is None else max(0, kv_len - length + 1 - window)
        entries, places = np.divmod(np.arange(first, kv_len), page_tokens)
        pages = table[entries]
        assert (pages >= 0).all(), "a token has no page, or one that the row sees is gone"
        self._pages[group][pages[-length:], places[-length:]] = plan.tokens[begin : begin + length]
        return self._pages[group][pages, places]

    def _advance(self, plan: StepPlan, row: int, group: int) -> Ints:
        """Read a state, write those after the row's tokens, and return what the last is made of."""
        read, *writes = [int(place) for place in plan.page_tables[group][row]]
        writes = [place for place in writes if place >= 0]
        begin, length = int(plan.query_start[row]), int(plan.query_len[row])
        before = self._states[group, read] if read >= 0 else np.zeros(0, np.int32)
        assert len(before) == int(plan.kv_len[row]) - length, "a row goes on from another place"
        beside = plan.rows_of(group_of(plan, row)) if plan.groups_count else slice(None)
        reads = plan.page_tables[group][beside, 0]
        assert not np.isin(writes, reads).any(), "a state is written that a row reads"
        assert len(writes) in (1, length), "a row writes its last state, or one after each token"
        after = np.concatenate([before, plan.tokens[begin : begin + length]])
        for later, write in enumerate(reversed(writes)):
            self._states[group, write] = after[: len(after) - later]
        return after

    def _draw(self, plan: StepPlan, row: int, contexts: list[Ints], logits: range) -> list[int]:
        """What the row draws from each of its `logits`, while its drafts foresaw it."""
        pairs = zip(contexts, self.windows, strict=False)
        full = next(context for context, window in pairs if window is None)
        for context, group in zip(contexts, self.groups, strict=True):
            seen = full[-len(context) :]
            assert context is full or np.array_equal(context, seen), f"{group.kind} pages disagree"
        ids: list[int] = []
        for known, logit in enumerate(logits, start=len(full) - len(logits) + 1):
            ids.append(self._next(plan, row, logit, full[:known], logit - logits[0]))
            if known < len(full) and full[known] != ids[-1]:
                break
        return ids

    def _next(self, plan: StepPlan, row: int, logit: int, context: Ints, drafts: int) -> int:
        """What follows a context of this row, of which so many are drafts, by these logits."""
        seed, choice = int(plan.sampling.seed[row]), int(plan.sampling.choice[row])
        counted: list[int] = []
        assert plan.part is not None, "a plan samples without its sampling part"
        if plan.part.penalties is not None and row in plan.part.penalties.rows:
            ahead = context[len(context) - drafts :].tolist()
            counted = [*self._counted[int(plan.slot[row])], *ahead]
        return next_token(context, self.windows, seed, choice, self.vocab_size, counted)


class Eager:
    """Computes plans as soon as all before them have their sampling parts."""

    thread: Thread | None = None

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._drafting = Drafting(runner)
        self._waiting: list[EagerFlight] = []

    def launch(self, plan: StepPlan) -> EagerFlight:
        flight = EagerFlight(plan, self._compute)
        self._waiting.append(flight)
        self._compute()
        return flight

    @property
    def draft_failures(self) -> int:
        return self._drafting.failures

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _compute(self) -> None:
        while self._waiting and self._waiting[0].plan.part is not None:
            self._waiting.pop(0).compute(self._runner, self._drafting)


class EagerFlight:
    def __init__(self, plan: StepPlan, completed: Callable[[], None]) -> None:
        self.plan = plan
        self._completed = completed
        self._outcome: StepOutcome | Exception | None = None

    @property
    def failed(self) -> bool:
        return isinstance(self._outcome, Exception)

    def compute(self, runner: PlanRunner, drafting: Drafting) -> None:
        try:
            self._outcome = runner.run(self.plan)
            if self.plan.draft_counts is not None:
                self._drafts = drafting.make(self.plan)
        except Exception as error:  # noqa: BLE001  # raised where the outcome is read
            self._outcome = error

    def sample(self, part: SamplingPart) -> None:
        self.plan = msgspec.structs.replace(self.plan, part=part)
        self._completed()

    def outcome(self) -> StepOutcome:
        assert self._outcome is not None, "a plan without its sampling part is read"
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def drafts(self) -> Ints:
        return self._drafts


class Cursed(Exception):
    """What a kernel might raise."""


class CursedRunner:
    """Raises for every plan that computes a certain token, after the others are written."""

    def __init__(self, runner: PlanRunner, token: int) -> None:
        self.runner = runner
        self.token = token
        self.raised = 0
        self._last: dict[int, int] = {}  # what each slot drew last, by its placeholder

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        outcome = self.runner.run(plan, part)
        tokens = [t if t >= 0 else self._last.get(t) for t in plan.tokens.tolist()]
        for row, slot in enumerate(plan.slot.tolist()):
            if outcome.starts[row] < outcome.starts[row + 1]:
                self._last[future(slot)] = int(outcome.token_ids[outcome.starts[row + 1] - 1])
        if self.token in tokens:
            self.raised += 1
            raise Cursed(f"step {plan.step}")
        return outcome

    def make_drafts(self) -> Ints:
        return self.runner.make_drafts()
