"""The flight recorder: the last step plans and their outcomes, in memory."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import (
    PLAIN,
    AlignmentRequest,
    Biases,
    LogprobsRequest,
    Penalties,
    SamplingPart,
    StepOutcome,
    StepPlan,
    Timestamps,
)
from antiphon.model_worker.batching.slot_tables import SlotTables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.cache.groups import CacheGroup

PLANS_MAX = 1_000
BYTES_MAX = 64 * 1024**2
"""Prompts and masks make up nearly all of it."""

_PLAN_BYTES = 1_024  # objects and their headers, about
_ROW_BYTES = 64  # a row's entries in every column, about
_TOKEN_BYTES = 8  # id, and perhaps a logit row


class StepRecord(msgspec.Struct, gc=False):
    """A plan, and its outcome once that is known, or what the runner raised instead.

    The outcome has no logprobs and vectors: a replay compares tokens and statuses.
    """

    plan: StepPlan
    outcome: StepOutcome | None = None
    failure: str = ""

    def end(self, outcome: StepOutcome) -> None:
        if outcome.details is not None or outcome.vectors is not None:
            outcome = msgspec.structs.replace(outcome, details=None, vectors=None)
        if outcome.plan is not None:
            # Without what the runner keeps by slot, and with the sampling part, which has followed.
            self.plan = msgspec.structs.replace(
                outcome.plan, page_tables=(), sampling=self.plan.sampling, part=self.plan.part
            )
            outcome = msgspec.structs.replace(outcome, plan=None)
        self.outcome = outcome

    def invalidate(self) -> None:
        """Drop the outcome of a plan that was launched on tokens that were never sampled."""
        self.outcome, self.failure = None, ""


class FlightRecorder:
    """Keeps plans by reference, since a plan never changes: recording one costs microseconds.

    Written in the loop's thread; `records` may be called from any other.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        plans_max: int = PLANS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._groups = groups
        self._before = SlotTables(groups)  # what runners keep by slot before the first plan
        self._lock = Lock()
        self._plans_max = plans_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._records: deque[tuple[StepRecord, int]] = deque()

    def begin(self, plan: StepPlan) -> StepRecord:
        """Record a plan that is about to run, so that one that hangs is recorded too."""
        record, size = StepRecord(plan), _size_bytes(plan)
        self._records.append((record, size))
        self._bytes += size
        with self._lock:
            while len(self._records) > self._plans_max or self._bytes > self._bytes_max:
                first, size = self._records.popleft()
                self._bytes -= size
                if first.plan.changes is not None:
                    self._before.apply(first.plan.changes)
        return record

    def complete(self, record: StepRecord, part: SamplingPart) -> None:
        """Add the sampling part that has followed a recorded plan."""
        record.plan = msgspec.structs.replace(record.plan, part=part)
        for index in range(len(self._records) - 1, -1, -1):
            found, size = self._records[index]
            if found is record:  # one of the last, unless it is too large to be kept
                self._records[index] = record, size + _part_bytes(part)
                self._bytes += _part_bytes(part)
                break

    def records(self) -> tuple[StepRecord, ...]:
        """The plans, the first of which brings what runners keep by slot before it, too."""
        with self._lock:
            records = [record for record, _ in self._records.copy()]
            before = SlotTables(self._groups)
            before.apply(self._before.snapshot())
        if not records:
            return ()
        if (changes := records[0].plan.changes) is not None:
            before.apply(changes)
        plan = msgspec.structs.replace(records[0].plan, changes=before.snapshot())
        return msgspec.structs.replace(records[0], plan=plan), *records[1:]


def summary(plan: StepPlan) -> dict[str, int]:
    return {
        "step": plan.step,
        "rows": len(plan.slot),
        "tokens": len(plan.tokens),
        "draws": len(plan.logit_tokens),
        "kv_tokens": int(plan.kv_len.sum()),
        "kv_tokens_max": int(np.max(plan.kv_len, initial=0)),
    }


def _size_bytes(plan: StepPlan) -> int:
    size = _PLAN_BYTES + _ROW_BYTES * len(plan.slot) + _TOKEN_BYTES * len(plan.tokens)
    if plan.changes is not None:
        size += sum(entries.nbytes for entries in plan.changes.entries)
    if plan.spliced_rows is not None:
        size += plan.spliced_rows.nbytes
    if plan.sources is not None:
        size += plan.sources.nbytes
    if plan.alignment is not None:
        size += _array_bytes(plan.alignment)
    if plan.axis_positions is not None:
        size += plan.axis_positions.nbytes
    if plan.details is not None:
        size += _array_bytes(plan.details)
    return size + _part_bytes(plan.part)


def _part_bytes(part: SamplingPart | None) -> int:
    if part is None or part is PLAIN:
        return 0
    size = 0 if part.token_masks is None else part.token_masks.nbytes
    return size + sum(
        _array_bytes(each) for each in (part.penalties, part.timestamps, part.biases) if each
    )


def _array_bytes(
    part: Penalties | Timestamps | Biases | LogprobsRequest | AlignmentRequest,
) -> int:
    """Counted exactly, since the sizes are chosen by clients."""
    return sum(getattr(part, name).nbytes for name in part.__slots__)
