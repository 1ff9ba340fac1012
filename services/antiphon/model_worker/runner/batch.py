"""A plan becomes what a pass needs: rows of each cache group, and where tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from antiphon.kernels.attention import AttentionRows, KvShape
from antiphon.kernels.states import StateRows
from antiphon.model_worker.runner.errors import PlanRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from antiphon.model_worker.batching.plan import Ints, Longs, Plan


@dataclass(frozen=True, slots=True)
class Batch:
    """The derived facts of one plan.

    Attributes:
        groups: The rows as each cache group sees them, those of states aside.
        states: The rows as each group of states sees them.
        token_row: (T,) the row of each token.
        logit_row: (L,) the row of each wanted row of logits, rising.
        logit_position: (L,) index in its sequence of the token that the logits are for.
    """

    groups: tuple[AttentionRows, ...]
    states: tuple[StateRows, ...]
    token_row: Longs
    logit_row: Longs
    logit_position: Longs


def build(plan: Plan, shapes: tuple[KvShape, ...], states: int) -> Batch:
    """Derive what the pass needs. Groups beyond those of `shapes` are so many groups of states.

    What comes after them keeps nothing.

    Raises:
        PlanRefused: The plan uses a part of the contract that this runner does not have.
    """
    _refuse_unsupported(plan)
    groups = tuple(
        AttentionRows.of(shape, table, plan.query_len, plan.kv_len)
        for shape, table in zip(shapes, plan.page_tables, strict=False)
    )
    kept = tuple(
        StateRows(table[:, 0], table[:, 1], plan.query_len, plan.kv_len)
        for table in plan.page_tables[len(shapes) : len(shapes) + states]
    )
    rows = len(plan.slot)
    if len(plan.tokens) == rows == len(plan.logit_tokens):
        # Decode rows and nothing else: most steps, and the shortest, in which this would show.
        row = np.arange(rows)
        return Batch(groups, kept, row, row, plan.kv_len.astype(np.int64))
    query_len, kv_len = plan.query_len, plan.kv_len
    ends = np.cumsum(query_len)
    assert (plan.query_start == ends - query_len).all(), "rows follow each other"
    token_row = np.repeat(np.arange(len(query_len)), query_len)
    logit_row = token_row[plan.logit_tokens]
    assert (np.diff(plan.logit_tokens) > 0).all(), "logits are asked for in order"
    return Batch(
        groups=groups,
        states=kept,
        token_row=token_row,
        logit_row=logit_row,
        logit_position=plan.logit_tokens + (kv_len - ends)[logit_row] + 1,
    )


class Futures:
    """What each slot sampled last, so that a plan may be made before its tokens are known.

    Plain numbers and not an array: between two passes the code of each array operation is fetched
    from memory anew, and for the few rows of a plan that takes longer than a loop over them.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def resolve(self, tokens: Ints) -> Ints:
        """Replace each `future(slot)` by the slot's last token."""
        if tokens.min() >= 0:
            return tokens
        unknown = tokens < 0
        slots = (-1 - tokens[unknown]).tolist()
        assert self._last.keys() >= set(slots), "a future of a slot that sampled nothing"
        resolved = tokens.copy()
        resolved[unknown] = [self._last[slot] for slot in slots]
        return resolved

    def record(
        self, slots: Ints, starts: Ints, token_ids: Ints, failed: NDArray[np.bool_] | None
    ) -> None:
        """Remember each row's last accepted token.

        A failed row, if there is any, gets token 0: a plan made before its failure was known still
        runs, for the sake of its other rows, and its own outcome is dropped.
        """
        ids = token_ids.tolist()
        for slot, (start, end) in zip(slots.tolist(), pairwise(starts.tolist()), strict=True):
            if start < end:
                self._last[slot] = ids[end - 1]
        if failed is not None:
            self._last.update(dict.fromkeys(slots[failed].tolist(), 0))


def _refuse_unsupported(plan: Plan) -> None:
    refusals = (
        (plan.tree_mask is not None, "tree verification"),
        (bool(plan.splices), "embedding splices"),
        (bool(plan.loads or plan.saves), "page moves"),
        (len(plan.positions) != 1, f"{len(plan.positions)} position axes"),
    )
    for present, what in refusals:
        if present:
            raise PlanRefused(f"step {plan.step}: this runner has no {what}")
