"""One plan of the plans of several attention groups, and the outcome of each in that of the whole.

Rows, tokens, logits and slots of a group follow those of the groups before it. So a rank runs such
a plan like any other, but for attention: see `StepPlan.group_rows`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import (
    PLAIN,
    SamplingPart,
    SlotChanges,
    StepOutcome,
    StepPlan,
)
from antiphon.model_worker.cache.groups import HOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from antiphon.model_worker.batching.plan import Ints, LogprobsBatch
    from antiphon.model_worker.batching.rows import StepRows

T = TypeVar("T")


class GroupOffset(msgspec.Struct, frozen=True):
    """What comes before a group in a joint plan."""

    slots: int = 0
    rows: int = 0
    tokens: int = 0
    logits: int = 0


Parts = list[tuple[T, GroupOffset]]
"""What some groups have, and where it begins."""

_INDICES = {
    "slot": "slots",
    "slots": "slots",
    "begun": "slots",
    "rows": "rows",
    "query_start": "tokens",
    "logit_tokens": "tokens",
    "prompt_tokens": "tokens",
    "spliced": "tokens",
    "axis_tokens": "tokens",
    "logits": "logits",
    "token_mask_logits": "logits",
}
"""The arrays of indices in a plan, whatever part of it they are in, and what they count."""

_STARTS = frozenset({"named_starts", "begun_starts"})
"""Arrays of where the parts of another one start, with its end."""


def offsets(rows: Sequence[StepRows], slots_each: int) -> list[GroupOffset]:
    """The offset of each group, whose rows these are and which has so many slots."""
    found, at = list[GroupOffset](), GroupOffset()
    for each in rows:
        found.append(at)
        at = GroupOffset(
            slots=at.slots + slots_each,
            rows=at.rows + len(each),
            tokens=at.tokens + int((each.ends - each.starts).sum()),
            logits=at.logits + int(each.logit_counts.sum()),
        )
    return found


def join_plans(
    step: int,
    plans: Sequence[StepPlan | None],
    changes: Sequence[SlotChanges | None],
    before: Sequence[GroupOffset],
) -> StepPlan:
    """The joint plan of one of each group; None: the group has no rows.

    `changes` are those of all groups, also where there are no rows: they are cleared by a launch.
    """
    assert any(plans), "a plan without rows"
    parts = _present(plans, before)
    counts = [0 if plan is None else len(plan.slot) for plan in plans]
    return StepPlan(
        step=step,
        slot=_array(parts, "slot"),
        query_start=_array(parts, "query_start"),
        query_len=_array(parts, "query_len"),
        kv_len=_array(parts, "kv_len"),
        tokens=np.concatenate([_tokens(plan.tokens, at) for plan, at in parts]),
        logit_tokens=_array(parts, "logit_tokens"),
        states=tuple(
            _padded(tables) for tables in zip(*(plan.states for plan, _ in parts), strict=True)
        ),
        part=None,
        details=_join([plan.details for plan, _ in parts], [at for _, at in parts]),
        changes=_join_changes(_present(changes, before)),
        spliced=_array_if_any(parts, "spliced"),
        spliced_rows=_array_if_any(parts, "spliced_rows"),
        position_offsets=_array_or_zeros(parts, "position_offsets", like="slot"),
        axis_tokens=_array_if_any(parts, "axis_tokens"),
        axis_positions=_array_if_any(parts, "axis_positions", axis=1),
        ahead=_array_or_zeros(parts, "ahead", like="tokens"),
        group_rows=np.cumsum([0, *counts], dtype=np.int32),
    )


def join_parts(parts: Sequence[SamplingPart], before: Sequence[GroupOffset]) -> SamplingPart:
    """The sampling part of a joint plan."""
    if not any(part.changes_logits for part in parts):
        return PLAIN
    both = _present(parts, before)
    return SamplingPart(
        penalties=_join([part.penalties for part in parts], before),
        token_masks=_array_if_any(both, "token_masks"),
        token_mask_logits=_array_if_any(both, "token_mask_logits"),
        timestamps=_join([part.timestamps for part in parts], before),
        biases=_join([part.biases for part in parts], before),
    )


def split_outcome(outcome: StepOutcome, rows: Sequence[StepRows]) -> list[StepOutcome | None]:
    """The outcome of each group; None: it has no rows."""
    found, first = list[StepOutcome | None](), 0
    for each in rows:
        end = first + len(each)
        found.append(_part(outcome, first, end) if len(each) else None)
        first = end
    return found


def _part(outcome: StepOutcome, first: int, end: int) -> StepOutcome:
    rows, starts = slice(first, end), outcome.starts[first : end + 1]
    return StepOutcome(
        step=outcome.step,
        starts=starts - starts[0],
        token_ids=outcome.token_ids[starts.item(0) : starts.item(-1)],
        status=outcome.status[rows],
        computed=outcome.computed[rows],
        details=None if outcome.details is None else _part_of_details(outcome.details, first, end),
    )


def _part_of_details(details: LogprobsBatch, first: int, end: int) -> LogprobsBatch | None:
    starts = details.starts[first : end + 1]
    entries = slice(starts.item(0), starts.item(-1))
    if entries.start == entries.stop:
        return None
    return replace(
        details,
        starts=starts - starts[0],
        token_ids=details.token_ids[entries],
        logprobs=details.logprobs[entries],
        top_ids=details.top_ids[entries],
        top_logprobs=details.top_logprobs[entries],
        named_logprobs=details.named_logprobs[entries],
        hidden=None if details.hidden is None else details.hidden[entries],
    )


def _present(parts: Sequence[T | None], before: Sequence[GroupOffset]) -> Parts[T]:
    return [(part, at) for part, at in zip(parts, before, strict=True) if part is not None]


def _join(parts: Sequence[T | None], before: Sequence[GroupOffset]) -> T | None:
    """One of all of these, which consist of arrays; None if all are."""
    if not (found := _present(parts, before)):
        return None
    kind = type(found[0][0])
    return kind(**{name: _array(found, name) for name in kind.__annotations__})


def _array(parts: Parts[Any], name: str, axis: int = 0) -> NDArray[Any]:
    """The arrays of this name, as one."""
    arrays = [getattr(part, name) for part, _ in parts]
    if name in _STARTS:
        lengths = [np.diff(each) for each in arrays]
        return np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int32)
    if (counted := _INDICES.get(name)) is not None:
        ats = [getattr(at, counted) for _, at in parts]
        arrays = [each + np.int32(at) for each, at in zip(arrays, ats, strict=True)]
    return np.concatenate(arrays, axis=axis)


def _array_if_any(parts: Parts[Any], name: str, axis: int = 0) -> NDArray[Any] | None:
    found = [(part, at) for part, at in parts if getattr(part, name) is not None]
    return _array(found, name, axis) if found else None


def _array_or_zeros(parts: Parts[Any], name: str, *, like: str) -> NDArray[Any] | None:
    """As many zeros as an array `like` it has where a plan has none, unless none has any."""
    arrays = [getattr(part, name) for part, _ in parts]
    if all(each is None for each in arrays):
        return None
    zeros = [np.zeros_like(getattr(part, like)) for part, _ in parts]
    return np.concatenate(
        [none if each is None else each for each, none in zip(arrays, zeros, strict=True)]
    )


def _tokens(tokens: Ints, at: GroupOffset) -> Ints:
    """With the placeholders of tokens in flight moved to their slots: see `future`."""
    return np.where(tokens < 0, tokens - np.int32(at.slots), tokens)


def _padded(tables: Sequence[Ints]) -> Ints:
    """States of a group of these, (R, 1 + W): as wide as the widest."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate(
        [
            np.pad(table, [(0, 0), (0, width - table.shape[1])], constant_values=HOLE)
            for table in tables
        ]
    )


def _join_changes(parts: Parts[SlotChanges]) -> SlotChanges | None:
    if not parts:
        return None
    sampling = _join([each.sampling for each, _ in parts], [at for _, at in parts])
    assert sampling is not None, "changes without sampling columns"
    moved = [np.array([[at.slots], [0], [0]], np.int32) for _, at in parts]
    return SlotChanges(
        slots=_array(parts, "slots"),
        sampling=sampling,
        entries=tuple(
            np.concatenate([table + by for table, by in zip(tables, moved, strict=True)], axis=1)
            for tables in zip(*(each.entries for each, _ in parts), strict=True)
        ),
    )
