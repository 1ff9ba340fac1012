"""What the batching loop asks of an engine core, whether it has one attention group or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from antiphon.model_worker.batching.media import MediaLoaded
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
    from antiphon.model_worker.batching.state import (
        AnyProgress,
        ChoiceKey,
        CoreTotals,
        EngineLimits,
        RequestState,
    )
    from antiphon.model_worker.batching.waiting_queue import Backlog
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.wire.command import PauseMode
    from antiphon.wire.errors import EngineError
    from antiphon.wire.kv_events import KvEvent


class LaunchableRows(Protocol):
    """The rows of a step, as the loop handles them: see `StepRows`."""

    def __len__(self) -> int: ...

    @property
    def prefill_rows(self) -> int: ...

    @property
    def prefill_tokens(self) -> int: ...

    def take(self, index: Indices) -> Self: ...


Rows = TypeVar("Rows", bound=LaunchableRows)


class StepCore(Protocol[Rows]):
    """An engine core, whose methods have the same names in `EngineCore`."""

    limits: EngineLimits

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]: ...

    @property
    def pages_total(self) -> int: ...

    @property
    def caches_prefixes(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    @property
    def starved(self) -> bool: ...

    @property
    def can_plan(self) -> bool: ...

    @property
    def next_due(self) -> float | None: ...

    # Between steps.

    def add(
        self, key: ChoiceKey, state: RequestState, now: float, matcher: GrammarMatcher | None = None
    ) -> None: ...

    def drop(self, key: ChoiceKey, kept: int | None = None) -> None: ...

    def requeue(self, keys: Sequence[ChoiceKey]) -> bool: ...

    def land(self, done: TransferDone | MediaLoaded) -> None: ...

    def expire(self, now: float) -> None: ...

    def flush(self) -> int: ...

    def prepare_pause(self, mode: PauseMode) -> int: ...

    def set_weight_version(self, weight_version: str) -> int: ...

    def use_tower(self, tower: str) -> None: ...

    # A step.

    def next_rows(self, now: float) -> Rows: ...

    def build_plan(self, step: int, rows: Rows, part: SamplingPart | None) -> StepPlan: ...

    def part_follows(self, rows: Rows) -> bool: ...

    def part(self, rows: Rows) -> SamplingPart: ...

    def launched(self, step: int) -> None: ...

    def finished(self, step: int) -> None: ...

    def commit(self, rows: Rows, outcome: StepOutcome) -> None: ...

    def wants_drafts(self, rows: Rows) -> bool: ...

    def note_drafts(self, rows: Rows, drafts: Ints) -> None: ...

    # A step that fails.

    def is_current(self, rows: Rows) -> Flags: ...

    def repeat(self, rows: Rows) -> Rows: ...

    def fail(self, rows: Rows, error: EngineError) -> None: ...

    def fail_choice(self, key: ChoiceKey, error: EngineError) -> None: ...

    def fail_planned(self, request: Request | None, error: EngineError) -> None: ...

    def fail_committed(self, rows: Rows, error: EngineError) -> None: ...

    def discard_launched(self, rows: Rows) -> None: ...

    # What is reported.

    def capacity(self) -> Capacity: ...

    def backlog(self) -> Backlog: ...

    def totals(self) -> CoreTotals: ...

    def take_started(self) -> Sequence[Request]: ...

    def take_progress(self) -> Sequence[AnyProgress]: ...

    def take_events(self) -> tuple[KvEvent, ...]: ...
