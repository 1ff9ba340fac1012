"""One plan of the plans of several attention groups, and the outcome of each in that of the whole.

Rows, tokens and slots of a group follow those of the groups before it. So a rank runs such a plan
like any other, but for attention: see `StepPlan.group_rows`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import (
    NO_COLUMNS,
    PLAIN,
    Biases,
    LogprobsRequest,
    Penalties,
    SamplingColumns,
    SamplingPart,
    SlotChanges,
    StepOutcome,
    StepPlan,
)
from antiphon.model_worker.cache.groups import HOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from antiphon.model_worker.batching.plan import Floats, Ints, LogprobsBatch
    from antiphon.model_worker.batching.rows import StepRows


class GroupOffset(msgspec.Struct, frozen=True):
    """What comes before a group in a joint plan."""

    slots: int = 0
    rows: int = 0
    logits: int = 0


def offsets(rows: Sequence[StepRows], slots_each: int) -> list[GroupOffset]:
    """The offset of each group, whose rows these are and which has so many slots."""
    found, at = list[GroupOffset](), GroupOffset()
    for each in rows:
        found.append(at)
        logits = at.logits + int(each.logit_counts.sum())
        at = GroupOffset(at.slots + slots_each, at.rows + len(each), logits)
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
    found = [(plan, at) for plan, at in zip(plans, before, strict=True) if plan is not None]
    tokens = np.cumsum([0, *(len(plan.tokens) for plan, _ in found)], dtype=np.int32).tolist()
    both = [(plan, at, first) for (plan, at), first in zip(found, tokens, strict=False)]
    spliced = _join_splices([(plan, first) for plan, _, first in both])
    axes = _join_axes([(plan, first) for plan, _, first in both])
    counts = [0 if plan is None else len(plan.slot) for plan in plans]
    return StepPlan(
        step=step,
        slot=_joined([plan.slot + at.slots for plan, at, _ in both]),
        query_start=_joined([plan.query_start + first for plan, _, first in both]),
        query_len=_joined([plan.query_len for plan, _, _ in both]),
        kv_len=_joined([plan.kv_len for plan, _, _ in both]),
        tokens=_joined([_tokens(plan.tokens, at) for plan, at, _ in both]),
        logit_tokens=_joined([plan.logit_tokens + first for plan, _, first in both]),
        states=tuple(
            _padded(tables) for tables in zip(*(plan.states for plan, _, _ in both), strict=True)
        ),
        part=None,
        details=_join_details(
            [(plan.details, at.rows, first) for plan, at, first in both if plan.details is not None]
        ),
        changes=_join_changes(
            [(each, at.slots) for each, at in zip(changes, before, strict=True) if each is not None]
        ),
        spliced=None if spliced is None else spliced[0],
        spliced_rows=None if spliced is None else spliced[1],
        position_offsets=_join_offsets([plan for plan, _, _ in both]),
        axis_tokens=None if axes is None else axes[0],
        axis_positions=None if axes is None else axes[1],
        ahead=_join_ahead([plan for plan, _, _ in both]),
        group_rows=np.cumsum([0, *counts], dtype=np.int32),
    )


def join_parts(parts: Sequence[SamplingPart], before: Sequence[GroupOffset]) -> SamplingPart:
    """The sampling part of a joint plan."""
    if not any(part.changes_logits for part in parts):
        return PLAIN
    both = list(zip(parts, before, strict=True))
    penalties = [
        (part.penalties, at.rows, at.slots) for part, at in both if part.penalties is not None
    ]
    biases = [(part.biases, at.logits) for part, at in both if part.biases is not None]
    masks = [part.token_masks for part in parts if part.token_masks is not None]
    masked = [
        part.token_mask_logits + at.logits
        for part, at in both
        if part.token_mask_logits is not None
    ]
    return SamplingPart(
        penalties=_join_penalties(penalties) if penalties else None,
        token_masks=np.concatenate(masks) if masks else None,
        token_mask_logits=_joined(masked) if masked else None,
        biases=_join_biases(biases) if biases else None,
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


def _tokens(tokens: Ints, at: GroupOffset) -> Ints:
    """With the placeholders of tokens in flight moved to their slots: see `future`."""
    return np.where(tokens < 0, tokens - at.slots, tokens)


def _padded(tables: Sequence[Ints]) -> Ints:
    """States of a group of these, (R, 1 + W): as wide as the widest."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate(
        [
            np.pad(table, [(0, 0), (0, width - table.shape[1])], constant_values=HOLE)
            for table in tables
        ]
    )


def _join_splices(parts: Sequence[tuple[StepPlan, int]]) -> tuple[Ints, Floats] | None:
    """Of plans whose tokens follow so many of others."""
    places = [plan.spliced + first for plan, first in parts if plan.spliced is not None]
    if not places:
        return None
    rows = [plan.spliced_rows for plan, _ in parts if plan.spliced_rows is not None]
    return _joined(places), np.concatenate(rows)


def _join_ahead(plans: Sequence[StepPlan]) -> Ints | None:
    if all(plan.ahead is None for plan in plans):
        return None
    return _joined(
        [np.zeros_like(plan.tokens) if plan.ahead is None else plan.ahead for plan in plans]
    )


def _join_offsets(plans: Sequence[StepPlan]) -> Ints | None:
    if all(plan.position_offsets is None for plan in plans):
        return None
    none = [np.zeros(len(plan.slot), np.int32) for plan in plans]
    offsets = [plan.position_offsets for plan in plans]
    return _joined([n if each is None else each for each, n in zip(offsets, none, strict=True)])


def _join_axes(parts: Sequence[tuple[StepPlan, int]]) -> tuple[Ints, Ints] | None:
    """Of plans whose tokens follow so many of others."""
    tokens = [plan.axis_tokens + first for plan, first in parts if plan.axis_tokens is not None]
    if not tokens:
        return None
    positions = [plan.axis_positions for plan, _ in parts if plan.axis_positions is not None]
    return _joined(tokens), np.concatenate(positions, axis=1)


def _join_details(parts: Sequence[tuple[LogprobsRequest, int, int]]) -> LogprobsRequest | None:
    if not parts:
        return None
    details = [each for each, _, _ in parts]
    return LogprobsRequest(
        rows=_joined([each.rows + rows for each, rows, _ in parts]),
        logprobs=np.concatenate([each.logprobs for each in details]),
        top=_joined([each.top for each in details]),
        named_starts=_join_starts([each.named_starts for each in details]),
        named_ids=_joined([each.named_ids for each in details]),
        hidden=np.concatenate([each.hidden for each in details]),
        prompt_tokens=_joined([each.prompt_tokens + tokens for each, _, tokens in parts]),
        prompt_targets=_joined([each.prompt_targets for each in details]),
    )


def _join_changes(parts: Sequence[tuple[SlotChanges, int]]) -> SlotChanges | None:
    if not parts:
        return None
    entries: list[Ints] = []
    for tables in zip(*(each.entries for each, _ in parts), strict=True):
        moved = [
            np.concatenate([table[:1] + slots, table[1:]])
            for table, (_, slots) in zip(tables, parts, strict=True)
        ]
        entries.append(np.concatenate(moved, axis=1).astype(np.int32, copy=False))
    columns = [each.sampling for each, _ in parts if len(each.slots)]
    return SlotChanges(
        slots=_joined([each.slots + slots for each, slots in parts]),
        sampling=_join_columns(columns) if columns else NO_COLUMNS,
        entries=tuple(entries),
    )


def _join_columns(columns: Sequence[SamplingColumns]) -> SamplingColumns:
    return SamplingColumns(
        **{
            name: np.concatenate([getattr(each, name) for each in columns])
            for name in SamplingColumns.__struct_fields__
        }
    )


def _join_penalties(parts: Sequence[tuple[Penalties, int, int]]) -> Penalties:
    penalties = [each for each, _, _ in parts]
    return Penalties(
        rows=_joined([each.rows + rows for each, rows, _ in parts]),
        frequency=np.concatenate([each.frequency for each in penalties]),
        presence=np.concatenate([each.presence for each in penalties]),
        repetition=np.concatenate([each.repetition for each in penalties]),
        begun=_joined([each.begun + slots for each, _, slots in parts]),
        begun_starts=_join_starts([each.begun_starts for each in penalties]),
        begun_ids=_joined([each.begun_ids for each in penalties]),
    )


def _join_biases(parts: Sequence[tuple[Biases, int]]) -> Biases:
    return Biases(
        logits=_joined([each.logits + logits for each, logits in parts]),
        token_ids=_joined([each.token_ids for each, _ in parts]),
        values=np.concatenate([each.values for each, _ in parts]),
    )


def _joined(arrays: Sequence[NDArray[np.int32]]) -> Ints:
    return np.concatenate(arrays).astype(np.int32, copy=False)


def _join_starts(starts: Sequence[Ints]) -> Ints:
    """Where parts start in an array that is joined of several: each with its end."""
    lengths = [np.diff(each) for each in starts]
    return np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int32)
