"""What a forward pass needs of a plan: rows of each cache group, and where tokens are sampled."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.recurrent import StateMetadata

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.model_worker.batching.plan import Ints, Longs, StepPlan


class PlanRefused(Exception):
    """A plan uses what this runner does not support, or is out of order."""


class InputBatch:
    """Values derived from one plan, each computed on first use: most passes need few of them.

    The groups after those of `shapes` are `states` groups of recurrent states; groups after these
    cache nothing.

    Attributes:
        decodes: Whether every row has one token and samples one: a decode step, the usual case.
    """

    def __init__(self, plan: StepPlan, shapes: tuple[KvShape, ...], states: int) -> None:
        self.decodes = len(plan.tokens) == len(plan.slot) == len(plan.logit_tokens)
        self._plan = plan
        self._shapes = shapes
        self._states_count = states
        self._groups: tuple[AttentionMetadata, ...] | None = None

    @property
    def groups(self) -> tuple[AttentionMetadata, ...]:
        """The rows as each KV cache group sees them, without groups of recurrent states."""
        if self._groups is None:  # functools.cached_property costs a lock and cold code
            plan = self._plan
            self._groups = tuple(
                AttentionMetadata.of(shape, table, plan.query_len, plan.kv_len)
                for shape, table in zip(self._shapes, plan.page_tables, strict=False)
            )
        return self._groups

    @cached_property
    def states(self) -> tuple[StateMetadata, ...]:
        """The rows as each group of recurrent states sees them."""
        plan, first = self._plan, len(self._shapes)
        return tuple(
            StateMetadata(table[:, 0], table[:, 1:], plan.query_len, plan.kv_len)
            for table in plan.page_tables[first : first + self._states_count]
        )

    @cached_property
    def token_row(self) -> Longs:
        """The row of each token, (T,)."""
        plan = self._plan
        if self.decodes:
            return np.arange(len(plan.slot))
        ends = np.cumsum(plan.query_len)
        assert (plan.query_start == ends - plan.query_len).all(), "rows follow each other"
        return np.repeat(np.arange(len(plan.slot)), plan.query_len)

    @cached_property
    def logit_row(self) -> Longs:
        """The row of each requested row of logits, (L,), ascending."""
        if self.decodes:
            return self.token_row
        wanted = self._plan.logit_tokens
        assert (np.diff(wanted) > 0).all(), "logits are asked for in order"
        return self.token_row[wanted]

    @cached_property
    def logit_position(self) -> Longs:
        """Index in its sequence of the token that each row of logits predicts, (L,)."""
        plan = self._plan
        if self.decodes:
            return plan.kv_len.astype(np.int64)
        ends = plan.query_start + plan.query_len
        return plan.logit_tokens + (plan.kv_len - ends)[self.logit_row].astype(np.int64) + 1

    def first_logits(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(R,) the flags (L,) of the first logits of each row; False for a row without logits."""
        first = np.zeros(len(self._plan.slot), np.bool_)
        rows, index = np.unique(self.logit_row, return_index=True)
        first[rows] = flags[index]
        return first

    def computed(self, accepted: Ints, status: Ints) -> Ints:
        """(R,) `StepOutcome.computed`, of the number of `accepted` tokens and the status."""
        plan = self._plan
        if self.decodes and not status.any():
            return plan.query_len
        verifies = np.bincount(self.logit_row, minlength=len(plan.slot)) > 1
        return np.where(status > 0, 0, np.where(verifies, accepted, plan.query_len))

    def failed_rows(self, tokens: Tensor | None, logits: Tensor | None) -> NDArray[np.bool_] | None:
        """Which rows have a NaN or infinity, (R,); None if none has.

        Hidden states count too: a prefill chunk has no logits, and other requests share its pages
        as soon as it is committed to the prefix cache.

        tokens (T,) whether a token's hidden state is finite, logits (L,) likewise; None: all are
        """
        if tokens is None and logits is None:
            return None
        failed = np.zeros(len(self._plan.slot), np.bool_)
        for finite, row in ((tokens, self.token_row), (logits, self.logit_row)):
            if finite is not None:
                failed[row[~finite.cpu().numpy()]] = True
        return failed


def build_input_batch(plan: StepPlan, shapes: tuple[KvShape, ...], states: int) -> InputBatch:
    """Derive the inputs of a forward pass from a plan that this runner supports."""
    if (axes := len(plan.positions)) != 1:
        raise PlanRefused(f"step {plan.step}: this runner has no {axes} position axes")
    return InputBatch(plan, shapes, states)


class FutureTokens:
    """The last token sampled in each slot, for plans that were made before it was known."""

    def __init__(self) -> None:
        self._last = np.full(_SLOTS, _UNKNOWN, np.int32)  # (S,)

    def resolve(self, tokens: Ints) -> Ints:
        """Replace each `future(slot)` by the slot's last token."""
        unknown = tokens < 0
        if not np.count_nonzero(unknown):
            return tokens
        resolved = tokens.copy()
        resolved[unknown] = last = self._last[-1 - tokens[unknown]]
        assert (last != _UNKNOWN).all(), "a future of a slot that sampled nothing"
        return resolved

    def record(
        self, slots: Ints, starts: Ints, token_ids: Ints, failed: NDArray[np.bool_] | None
    ) -> None:
        """Record each row's last accepted token.

        A failed row gets token 0: a plan made before the failure was known still runs for the sake
        of its other rows, and the failed row's own outcome is dropped.
        """
        if (more := max(slots.tolist()) + 1 - len(self._last)) > 0:
            self._last = np.append(self._last, np.full(more + len(slots), _UNKNOWN, np.int32))
        ends = starts[1:]
        accepted = ends > starts[:-1]
        self._last[slots[accepted]] = token_ids[ends[accepted] - 1]
        if failed is not None:
            self._last[slots[failed]] = 0


_SLOTS = 256
_UNKNOWN = -1
