"""What a forward pass needs of a plan: rows of each cache group, and where tokens are sampled."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from antiphon.kernels.attention import AttentionMetadata, ImageRows, KvShape
from antiphon.kernels.recurrent import StateMetadata
from antiphon.model_worker.batching.plan import are_drafts
from antiphon.model_worker.batching.positions import AXES
from antiphon.model_worker.cache.groups import HOLE, UNKNOWN_STATE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.upload import Upload
    from antiphon.model_worker.batching.plan import Flags, Ints, Longs, StepPlan


class PlanRefused(Exception):
    """A plan uses what this runner does not support, or is out of order."""


class InputBatch:
    """Values derived from one plan, each computed on first use: most passes need few of them.

    The groups after those of `shapes` are `states` groups of recurrent states; groups after these
    cache nothing. Of a plan of several attention groups, one `group` has pages and states here.

    Attributes:
        decodes: Whether every row has one token and samples one: a decode step, the usual case.
        own_rows, own_tokens: Which rows and tokens of this batch `own` has.
    """

    def __init__(
        self,
        plan: StepPlan,
        shapes: tuple[KvShape, ...],
        states: int,
        group: int | None = None,
        upload: Upload = torch.as_tensor,
    ) -> None:
        self.decodes = len(plan.tokens) == len(plan.slot) == len(plan.logit_tokens)
        self.plan = self._plan = plan
        self._own: InputBatch | None = None
        self.own_rows = self.own_tokens = _ALL
        if group is not None:
            self.own_rows = rows = plan.rows_of(group)
            self.own_tokens = tokens = plan.tokens_of(rows)
            part = _part(plan, rows, tokens)
            self._own = InputBatch(part, shapes, states, upload=upload)
        self._shapes = shapes
        self._states_count = states
        self._upload = upload
        self._groups: tuple[AttentionMetadata, ...] | None = None

    def build(self, *, compiled: bool) -> None:
        """Derive all that layers and sampling will use; `compiled`: for attention kernels, too.

        Raises:
            RuntimeError: A row reads or writes a token that has no page.
        """
        own = self.own
        _ = self.positions, self.logit_position
        if not len(own.plan.slot):
            return
        _ = own.states, own.rotary_positions
        for rows in own.groups:
            _ = rows.slot_mapping
            if compiled:
                _ = rows.compiled

    @property
    def own(self) -> InputBatch:
        """The rows that have pages and states here, as a batch: maybe none."""
        # An attribute of itself would leave each batch to the garbage collector.
        return self if self._own is None else self._own

    @property
    def groups(self) -> tuple[AttentionMetadata, ...]:
        """The rows as each KV cache group sees them, without groups of recurrent states."""
        if self._groups is None:  # functools.cached_property costs a lock and cold code
            plan = self._plan
            self._groups = tuple(
                AttentionMetadata.of(shape, table, plan.query_len, plan.kv_len, self._upload)
                for shape, table in zip(self._shapes, plan.page_tables, strict=False)
            )
        return self._groups

    def drop_groups(self) -> None:
        """Drop what backends have planned of these rows, once the device has computed them."""
        self._groups = None

    @cached_property
    def images(self) -> tuple[ImageRows, ...] | None:
        """The tokens that see each other, for each KV cache group; None: there are none."""
        ahead = self._plan.ahead
        if ahead is None or not ahead.any():
            return None
        return tuple(ImageRows(rows, ahead) for rows in self.groups)

    @cached_property
    def states(self) -> tuple[StateMetadata, ...]:
        """The rows as each group of recurrent states sees them."""
        plan, first = self._plan, len(self._shapes)
        return tuple(
            StateMetadata(table[:, 0], table[:, 1:], plan.query_len, plan.kv_len, self._upload)
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
    def positions(self) -> Ints:
        """Index in its sequence of each token, (T,)."""
        plan = self._plan
        if self.decodes:
            return plan.kv_len - 1
        ends = plan.query_start + plan.query_len
        tokens = np.arange(len(plan.tokens), dtype=np.int32)
        return tokens + (plan.kv_len - ends)[self.token_row]

    @cached_property
    def rotary_positions(self) -> Ints:
        """Position of each token, (T,), or along each axis, (3, T), where some differ."""
        plan, positions = self._plan, self.positions
        if plan.position_offsets is not None:
            positions = positions + plan.position_offsets[self.token_row]
        if plan.axis_tokens is None or plan.axis_positions is None:
            return positions
        axes = np.tile(positions, (AXES, 1))
        axes[:, plan.axis_tokens] = plan.axis_positions
        return axes

    @cached_property
    def logit_position(self) -> Longs:
        """Index in its sequence of the token that each row of logits predicts, (L,)."""
        plan = self._plan
        if self.decodes:
            return plan.kv_len.astype(np.int64)
        return self.positions[plan.logit_tokens].astype(np.int64) + 1

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
        return self.failed_of(
            None if tokens is None else tokens.cpu().numpy(),
            None if logits is None else logits.cpu().numpy(),
        )

    def failed_of(self, tokens: Flags | None, logits: Flags | None) -> Flags | None:
        """`failed_rows` of flags that the host has."""
        failed = np.zeros(len(self._plan.slot), np.bool_)
        for finite, row in ((tokens, self.token_row), (logits, self.logit_row)):
            if finite is not None:
                failed[row[~finite]] = True
        return failed if failed.any() else None


def _part(plan: StepPlan, rows: slice, tokens: slice) -> StepPlan:
    """Some neighbouring rows of a plan, as layers read them: what is sampled is left out."""
    offsets, axis_tokens, axis_positions = plan.position_offsets, plan.axis_tokens, None
    if axis_tokens is not None and plan.axis_positions is not None:
        first, last = np.searchsorted(axis_tokens, (tokens.start, tokens.stop)).tolist()
        axis_positions = plan.axis_positions[:, first:last]
        axis_tokens = axis_tokens[first:last] - np.int32(tokens.start) if first < last else None
    return msgspec.structs.replace(
        plan,
        slot=plan.slot[rows],
        query_start=plan.query_start[rows] - tokens.start,
        query_len=plan.query_len[rows],
        kv_len=plan.kv_len[rows],
        tokens=plan.tokens[tokens],
        logit_tokens=plan.logit_tokens[:0],
        page_tables=tuple([table[rows] for table in plan.page_tables]),
        states=tuple([table[rows] for table in plan.states]),
        position_offsets=None if offsets is None else offsets[rows],
        axis_tokens=axis_tokens,
        axis_positions=None if axis_tokens is None else axis_positions,
        ahead=None if plan.ahead is None else plan.ahead[tokens],
        group_rows=None,
    )


class SlotState:
    """What a runner knows of each slot before the host does, for plans that were made without it.

    Axes: S slots, K drafts.
    """

    def __init__(self) -> None:
        self._last = np.full(_SLOTS, _UNKNOWN, np.int32)  # (S,) the last token sampled
        self._length = np.zeros(_SLOTS, np.int32)  # (S,) computed tokens
        self._states = np.full((_SLOTS, 0), HOLE, np.int32)  # (S, N) the current one, by group
        self._drafts = np.zeros((_SLOTS, 0), np.int32)  # (S, K) 0 where there is none
        self._reserved: Ints | None = None  # the slots of the last plan, for which there is room

    def resolve(self, plan: StepPlan, states: slice) -> StepPlan:
        """The plan with what it leaves open filled in; `states` are the groups of states."""
        if plan.future_start is not None:
            self._reserve(plan.slot)
            plan = self._place(plan, plan.future_start, states)
        unknown = plan.tokens < 0
        if not len(unknown.nonzero()[0]):
            return plan
        tokens = plan.tokens.copy()
        drafts = are_drafts(tokens)
        if np.count_nonzero(drafts):
            at = np.flatnonzero(drafts)
            row = np.searchsorted(plan.query_start, at, side="right") - 1
            tokens[at] = self._drafts[plan.slot[row], at - plan.query_start[row] - 1]
            unknown &= ~drafts
        tokens[unknown] = last = self._last[-1 - plan.tokens[unknown]]
        assert (last != _UNKNOWN).all(), "a future of a slot that sampled nothing"
        return msgspec.structs.replace(plan, tokens=tokens)

    def _place(self, plan: StepPlan, future_start: Flags, states: slice) -> StepPlan:
        """The plan with rows that follow at their places."""
        ends = self._length[plan.slot] + plan.query_len
        kv_len = np.where(future_start, ends, plan.kv_len)
        tables = list(plan.page_tables)
        for number, group in enumerate(range(*states.indices(len(tables)))):
            tables[group] = tables[group].copy()
            read = tables[group][:, 0]
            read[:] = np.where(read == UNKNOWN_STATE, self._states[plan.slot, number], read)
        return msgspec.structs.replace(
            plan,
            kv_len=kv_len,
            page_tables=tuple(tables),
            states=tuple(tables[states]),
            future_start=None,
        )

    def record(
        self, slots: Ints, starts: Ints, token_ids: Ints, failed: NDArray[np.bool_] | None
    ) -> None:
        """Record each row's last accepted token.

        A failed row gets token 0: a plan made before the failure was known still runs for the sake
        of its other rows, and the failed row's own outcome is dropped.
        """
        self._reserve(slots)
        ends = starts[1:]
        accepted = ends > starts[:-1]
        self._last[slots[accepted]] = token_ids[ends[accepted] - 1]
        if failed is not None:
            self._last[slots[failed]] = 0

    def record_each(self, slots: Ints, tokens: Ints) -> None:
        """`record` of rows that each have accepted one token, (R,)."""
        self._reserve(slots)
        self._last[slots] = tokens

    def record_places(self, plan: StepPlan, computed: Ints, states: slice) -> None:
        """Record where each row of a resolved plan has ended, which the host cannot foresee."""
        self._length[plan.slot] = plan.kv_len - plan.query_len + computed
        groups = plan.page_tables[states]
        if self._states.shape[1] != len(groups):
            self._states = np.full((len(self._last), len(groups)), HOLE, np.int32)
        for number, table in enumerate(groups):
            several = np.count_nonzero(table[:, 1:] >= 0, axis=1) > 1
            place = np.where(several, np.maximum(computed, 1), 1)
            self._states[plan.slot, number] = table[np.arange(len(place)), place]

    def record_failure(self, plan: StepPlan, states: slice) -> None:
        """Record the rows of a resolved plan that failed as if none of their tokens counted.

        Plans made before the failure was known still run, and are dropped. They must read and
        write what belongs to their requests, not where an earlier request of the slot has ended.
        """
        rows = len(plan.slot)
        self._reserve(plan.slot)
        self._last[plan.slot] = 0
        if plan.draft_counts is not None:
            self.record_places(plan, np.zeros(rows, np.int32), states)
            drafts = np.zeros((rows, plan.draft_counts.max(initial=0)), np.int32)
            self.record_drafts(plan.slot, drafts)

    def record_drafts(self, slots: Ints, drafts: Ints) -> None:
        """Record the drafts (R, K) of these slots; negative where there is none."""
        if (width := drafts.shape[1]) > self._drafts.shape[1]:
            wider = np.zeros((len(self._last), width), np.int32)
            wider[:, : self._drafts.shape[1]] = self._drafts
            self._drafts = wider
        self._drafts[slots, :width] = np.maximum(drafts, 0)

    def _reserve(self, slots: Ints) -> None:
        """Make the arrays long enough for these slots."""
        if slots is self._reserved:  # plans of the same rows share them
            return
        self._reserved = slots
        if (more := max(slots.tolist()) + 1 - len(self._last)) <= 0:
            return
        more += len(slots)
        self._last = np.append(self._last, np.full(more, _UNKNOWN, np.int32))
        self._length = np.append(self._length, np.zeros(more, np.int32))
        width = [(0, more), (0, 0)]
        self._states, self._drafts = np.pad(self._states, width), np.pad(self._drafts, width)


_ALL = slice(None)
_SLOTS = 256
_UNKNOWN = -1
