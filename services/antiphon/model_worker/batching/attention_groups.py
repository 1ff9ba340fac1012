"""Engine cores in lockstep: the attention groups of one worker, each with requests of its own.

Each group has a queue, slots, pages and a radix tree, and plans by itself. All have their rows in
one plan, which all ranks compute; a group without rows is idle in that step, and its ranks take
part in whatever the ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from antiphon.model_worker.batching.faults import raise_if_shared
from antiphon.model_worker.batching.joint_plan import (
    join_parts,
    join_plans,
    offsets,
    split_outcome,
)
from antiphon.model_worker.batching.media import MediaLoaded
from antiphon.model_worker.batching.plan import PLAIN
from antiphon.model_worker.batching.state import SampledTokens
from antiphon.model_worker.cache.tree import CacheKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from antiphon.model_worker.batching.engine_core import EngineCore
    from antiphon.model_worker.batching.page_budget import Capacity
    from antiphon.model_worker.batching.page_transfers import TransferDone
    from antiphon.model_worker.batching.plan import (
        Flags,
        Indices,
        Ints,
        SamplingPart,
        StepOutcome,
        StepPlan,
    )
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.rows import StepRows
    from antiphon.model_worker.batching.state import (
        AnyProgress,
        ChoiceKey,
        CoreTotals,
        RequestState,
    )
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.wire.command import PauseMode
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import RequestId
    from antiphon.wire.kv_events import KvEvent

S = TypeVar("S", bound=msgspec.Struct)

AHEAD_MAX = 1
"""How many more choices than the least busy group a group may have to get another one, because it
has cached more of the prompt."""


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The rows of a step, by group; those of a group follow those of the groups before it."""

    groups: tuple[StepRows, ...]

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    @property
    def prefill_rows(self) -> int:
        return sum(rows.prefill_rows for rows in self.groups)

    @property
    def prefill_tokens(self) -> int:
        return sum(rows.prefill_tokens for rows in self.groups)

    def take(self, index: Indices) -> GroupedRows:
        """Some of the rows, by ascending index."""
        ends = np.cumsum([len(rows) for rows in self.groups])
        parts = np.split(index, np.searchsorted(index, ends[:-1]))
        starts = [0, *ends[:-1].tolist()]
        return GroupedRows(
            tuple(
                rows.take(part - start)
                for rows, part, start in zip(self.groups, parts, starts, strict=True)
            )
        )


class AttentionGroups:
    """The engine cores of all attention groups: a `StepCore`.

    A new request goes to the group with the longest cached prefix, of those that are hardly busier
    than the others; all its choices go to one group.
    """

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        self.cores = tuple(cores)
        first = cores[0].limits
        self._slots = first.running_max
        self.limits = msgspec.structs.replace(
            first,
            running_max=first.running_max * len(cores),
            queue_max=first.queue_max * len(cores),
            step_tokens_max=first.step_tokens_max * len(cores),
        )
        self._placed: tuple[RequestId, EngineCore] | None = None
        self._planning = self.cores[0]
        self._built = GroupedRows(())

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.cores[0].cache_groups

    @property
    def pages_total(self) -> int:
        return sum(core.pages_total for core in self.cores)

    @property
    def caches_prefixes(self) -> bool:
        return self.cores[0].caches_prefixes

    @property
    def idle(self) -> bool:
        return all(core.idle for core in self.cores)

    @property
    def starved(self) -> bool:
        return all(core.idle or core.starved for core in self.cores)

    @property
    def can_plan(self) -> bool:
        return any(core.can_plan for core in self.cores)

    @property
    def next_due(self) -> float | None:
        dues = (core.next_due for core in self.cores)
        return min((due for due in dues if due is not None), default=None)

    def add(
        self, key: ChoiceKey, state: RequestState, now: float, matcher: GrammarMatcher | None = None
    ) -> None:
        if self._placed is None or self._placed[0] != state.request_id:
            self._placed = state.request_id, self._place(state)
        self._placed[1].add(key, state, now, matcher)

    def _place(self, state: RequestState) -> EngineCore:
        least = min(core.live_count for core in self.cores)
        near = [core for core in self.cores if core.live_count <= least + AHEAD_MAX]

        def rank(core: EngineCore) -> tuple[int, int]:
            namespace = core.batch.prefixes.namespace_of(state)
            key = CacheKey(namespace=namespace, token_ids=state.key_ids() + state.output_ids)
            return core.index.peek(key).length, -core.live_count

        return max(near, key=rank)

    def drop(self, key: ChoiceKey, kept: int | None = None) -> None:
        for core in self.cores:
            core.drop(key, kept)

    def requeue(self, keys: Sequence[ChoiceKey]) -> bool:
        return any(core.requeue(keys) for core in self.cores)

    def land(self, done: TransferDone | MediaLoaded) -> None:
        assert isinstance(done, MediaLoaded), "no pages are transferred"
        for core in self.cores:
            core.land(done)

    def expire(self, now: float) -> None:
        for core in self.cores:
            core.expire(now)

    def flush(self) -> int:
        return sum(core.flush() for core in self.cores)

    def prepare_pause(self, mode: PauseMode) -> int:
        return sum(core.prepare_pause(mode) for core in self.cores)

    def set_weight_version(self, weight_version: str) -> int:
        self.limits = msgspec.structs.replace(self.limits, weight_version=weight_version)
        return sum(core.set_weight_version(weight_version) for core in self.cores)

    def use_tower(self, tower: str) -> None:
        for core in self.cores:
            core.use_tower(tower)

    def next_rows(self, now: float) -> GroupedRows:
        planned: list[tuple[EngineCore, StepRows]] = []
        try:
            for core in self.cores:
                self._planning = core
                planned.append((core, core.plan_rows(now)))
        except Exception:
            for core, rows in planned:
                if len(rows):
                    core.discard_launched(rows)
            raise
        if all(core.stalled for core in self.cores):
            for core in self.cores:
                core.wait_for_matcher()
        return GroupedRows(tuple(rows for _, rows in planned))

    def build_plan(self, step: int, rows: GroupedRows, part: SamplingPart | None) -> StepPlan:
        self._built = rows
        plans = [
            core.build_plan(step, own, PLAIN) if len(own) else None
            for core, own in zip(self.cores, rows.groups, strict=True)
        ]
        changes = [core.batch.changes.read() for core in self.cores]
        plan = join_plans(step, plans, changes, offsets(rows.groups, self._slots))
        return msgspec.structs.replace(plan, part=part)

    def part_follows(self, rows: GroupedRows) -> bool:
        return any(core.part_follows(own) for core, own in self._of(rows))

    def part(self, rows: GroupedRows) -> SamplingPart:
        parts = [
            core.part(own) if len(own) else PLAIN
            for core, own in zip(self.cores, rows.groups, strict=True)
        ]
        return join_parts(parts, offsets(rows.groups, self._slots))

    def launched(self, step: int) -> None:
        for core, own in zip(self.cores, self._built.groups, strict=True):
            if len(own):
                core.launched(step)
            else:  # the step reads none of its pages: those released meanwhile are free at once
                core.batch.changes.clear()

    def finished(self, step: int) -> None:
        for core in self.cores:
            core.finished(step)

    def commit(self, rows: GroupedRows, outcome: StepOutcome) -> None:
        """Apply the outcome of a plan: see `EngineCore`; raises what a group has, after all."""
        failed: list[Exception] = []
        outcomes = split_outcome(outcome, rows.groups)
        for core, own, found in zip(self.cores, rows.groups, outcomes, strict=True):
            if found is None:
                continue
            try:
                core.commit(own, found)
            except Exception as error:  # noqa: BLE001  # raised below, once all have theirs
                raise_if_shared(error)
                failed.append(error)
        if failed:
            raise failed[0]

    def note_drafts(self, rows: GroupedRows, read: Callable[[], Ints]) -> None:
        """There is no draft model."""

    def is_current(self, rows: GroupedRows) -> Flags:
        pairs = zip(self.cores, rows.groups, strict=True)
        return np.concatenate([core.is_current(own) for core, own in pairs])

    def repeat(self, rows: GroupedRows) -> GroupedRows:
        pairs = zip(self.cores, rows.groups, strict=True)
        return GroupedRows(tuple(core.repeat(own) if len(own) else own for core, own in pairs))

    def fail(self, rows: GroupedRows, error: EngineError) -> None:
        for core, own in self._of(rows):
            core.fail(own, error)

    def fail_choice(self, key: ChoiceKey, error: EngineError) -> None:
        owner = (core for core in self.cores if key in core)
        next(owner, self.cores[0]).fail_choice(key, error)

    def fail_planned(self, request: Request | None, error: EngineError) -> None:
        """See `EngineCore`; of the group that was planning."""
        self._planning.fail_planned(request, error)

    def fail_committed(self, rows: GroupedRows, error: EngineError) -> None:
        for core, own in self._of(rows):
            core.fail_committed(own, error)

    def discard_launched(self, rows: GroupedRows) -> None:
        for core, own in self._of(rows):
            core.discard_launched(own)

    def _of(self, rows: GroupedRows) -> Iterator[tuple[EngineCore, StepRows]]:
        """The groups that have rows, with these."""
        for core, own in zip(self.cores, rows.groups, strict=True):
            if len(own):
                yield core, own

    def capacity(self) -> Capacity:
        return _sum([core.capacity() for core in self.cores])

    def totals(self) -> CoreTotals:
        found = [core.totals() for core in self.cores]
        totals = _sum(found)
        ratio = totals.new_token_ratio / len(found)
        return msgspec.structs.replace(totals, new_token_ratio=ratio)

    def take_started(self) -> Sequence[Request]:
        return [request for core in self.cores for request in core.take_started()]

    def take_progress(self) -> Sequence[AnyProgress]:
        moved: list[AnyProgress] = []
        for number, core in enumerate(self.cores):
            first = number * self._slots
            moved += [_move(progress, first) for progress in core.take_progress()]
        return moved

    def take_events(self) -> tuple[KvEvent, ...]:
        """Events of the blocks that any group has cached: their trees have one tracker."""
        return tuple(event for core in self.cores for event in core.take_events())


def _move(progress: AnyProgress, slots: int) -> AnyProgress:
    """The progress of a group, in slots that follow so many of other groups."""
    if isinstance(progress, SampledTokens):
        return msgspec.structs.replace(progress, slots=progress.slots + slots)
    if progress.slot < 0 or not slots:
        return progress
    return msgspec.structs.replace(progress, slot=progress.slot + slots)


def _sum(parts: Sequence[S]) -> S:
    """The sum of each number; None where a part has none."""
    sums: dict[str, object] = {}
    for name in parts[0].__struct_fields__:
        values = [getattr(part, name) for part in parts]
        if any(value is None for value in values):
            sums[name] = None
        else:
            sums[name] = _sum(values) if isinstance(values[0], msgspec.Struct) else sum(values)
    return type(parts[0])(**sums)
