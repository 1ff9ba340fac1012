"""Sampling: the token of each row of logits depends on its row's parameters and on nothing else.

Axes: R rows, L rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.sampling import uniform
from antiphon.wire.sampling import TEMPERATURE_MIN

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.kernels.upload import Upload
    from antiphon.model_worker.batching.plan import (
        Floats,
        Ints,
        Longs,
        Penalties,
        SamplingColumns,
        StepPlan,
        Timestamps,
    )


class Sampler:
    """Samples tokens on one rank; every rank samples the same."""

    def __init__(self, ops: Ops, upload: Upload = torch.as_tensor) -> None:
        self._ops = ops
        self._upload = upload
        self._counts_by_slot = TokenCounts(upload)

    def process_logits(
        self, plan: StepPlan, logit_row: Longs, tokens: Ints, logits: Tensor
    ) -> NDArray[np.bool_] | None:
        """Apply penalties, masks and biases to the logits, in place and in this order.

        logit_row (L,) the plan's row of each, ascending; tokens (T,), of which those that are not
        the first of their row are no futures; logits (L, V) float32, finite  ->  (L,) which have no
        token left; None if certainly none
        """
        if not self.change_logits(plan, logit_row, tokens, logits):
            return None
        blocked = torch.isneginf(logits.amax(dim=-1)).cpu().numpy()
        return blocked if blocked.any() else None

    def change_logits(self, plan: StepPlan, logit_row: Longs, tokens: Ints, logits: Tensor) -> bool:
        """`process_logits` without a wait  ->  whether some may have no token left."""
        part = plan.part
        assert part is not None, "a plan without a sampling part"
        if part.penalties is not None:
            self._counts_by_slot.begin(part.penalties)
            self._counts_by_slot.apply(self._ops, logits, logit_row, tokens, plan, part.penalties)
        if part.token_masks is not None:
            assert part.token_mask_logits is not None, "masks of no logits"
            masked = self._upload(part.token_mask_logits.astype(np.int64))
            self._ops.mask(logits, masked, self._upload(part.token_masks))
        if part.timestamps is not None:
            self._prefer_timestamps(logits, part.timestamps)
        if part.biases is not None:
            biased = self._upload(part.biases.logits.astype(np.int64))
            ids = self._upload(part.biases.token_ids.astype(np.int64))
            self._ops.bias(logits, biased, ids, self._upload(part.biases.values))
        return part.token_masks is not None or part.biases is not None

    def _prefer_timestamps(self, logits: Tensor, timestamps: Timestamps) -> None:
        """Leave no text where all timestamps together are likelier than each token of it, in place.

        Source: Radford et al. 2022, `ApplyTimestampRules` of https://github.com/openai/whisper.
        """
        rows = self._upload(timestamps.logits.astype(np.int64))
        first = self._upload(timestamps.first_ids.astype(np.int64))[:, None]
        some = logits[rows]  # (B, V)
        timed = torch.arange(some.shape[-1], device=some.device) >= first  # (B, V)
        ones = torch.ones(len(some), device=some.device)
        # Not a number where the masks leave no timestamp: which is not more than anything.
        together = self._ops.logsumexp(some.masked_fill(~timed, -torch.inf), ones)
        likeliest = some.masked_fill(timed, -torch.inf).amax(dim=-1)
        wins = (together > likeliest)[:, None]
        logits[rows] = some.masked_fill(wins & ~timed, -torch.inf)

    def sample(
        self,
        columns: SamplingColumns,
        logits: Tensor,
        rows: Longs,
        positions: Longs,
        argmax: Ints | None = None,
    ) -> Ints:
        """Sample a token from each row of logits.

        logits (L, V) float32; rows (L,) the plan's row of each; positions (L,) the index in its
        sequence of the token being sampled; argmax (L,) the first of the highest of each, where
        already computed; it may be overwritten  ->  (L,)
        """
        if not len(rows):
            return np.zeros(0, np.int32)
        random = is_random(columns)[rows]
        if random.all():
            return _ints(self._draw(columns, logits, rows, positions))
        tokens = _ints(self._ops.argmax(logits)) if argmax is None else argmax
        random_rows = np.flatnonzero(random)
        if len(random_rows):
            some = logits[self._upload(random_rows)]
            tokens[random_rows] = _ints(
                self._draw(columns, some, rows[random_rows], positions[random_rows])
            )
        return tokens

    def draw(
        self, columns: SamplingColumns, logits: Tensor, rows: Longs, positions: Longs
    ) -> Tensor:
        """`sample` without a wait for the device  ->  (L,) int64; at least one row."""
        random = is_random(columns)[rows]
        if random.all():
            return self._draw(columns, logits, rows, positions)
        tokens = self._ops.argmax(logits)
        if len(at := np.flatnonzero(random)):
            index = self._upload(at)
            some = logits.index_select(0, index)
            tokens.index_copy_(0, index, self._draw(columns, some, rows[at], positions[at]))
        return tokens

    def count(self, plan: StepPlan, starts: Ints, token_ids: Ints) -> None:
        """Count the accepted tokens of rows with penalties, row r `[starts[r], starts[r + 1])`."""
        if plan.part is None or plan.part.penalties is None:
            return
        rows = plan.part.penalties.rows
        accepted = starts[rows + 1] - starts[rows]
        for number in range(int(accepted.max(initial=0))):
            more = rows[accepted > number]
            self._counts_by_slot.count(plan.slot[more], token_ids[starts[more] + number])

    def _draw(
        self, columns: SamplingColumns, logits: Tensor, rows: Longs, positions: Longs
    ) -> Tensor:
        noise = uniform(columns.seed[rows], columns.choice[rows], positions)
        filters = map(self._upload, columns.filters(rows))
        return self._ops.sample(logits, self._upload(noise), *filters)


def is_random(columns: SamplingColumns) -> NDArray[np.bool_]:
    """Which rows are sampled at random, (R,); the others take the argmax."""
    return (columns.temperature >= TEMPERATURE_MIN) & (columns.top_k != 1)


def greedy(columns: SamplingColumns) -> bool:
    return not any(columns.temperature.tolist())


def accept(
    tokens: Ints,
    logit_tokens: Ints,
    logit_row: Longs,
    sampled: Ints,
    rows: int,
    failed: NDArray[np.bool_] | None,
    blocked: NDArray[np.bool_] | None = None,
) -> tuple[Ints, Ints]:
    """Accept a row's samples up to and including the first that differs from its draft.

    A verify row requests logits at several of its tokens; each later token is a draft of the token
    that the one before it predicts. The random numbers of sampling depend on the position alone, so
    this gives, token for token, what decoding one by one would give. Other rows have no drafts.

    Axes: T tokens, L rows of logits, R rows, S accepted tokens.
    tokens (T,) with futures resolved; logit_tokens, logit_row, sampled (L,); failed (R,) bool, or
    None if none has; blocked (L,) bool, logits that have no token to sample  ->  starts (R + 1,),
    token_ids (S,), both int32; a failed row has none
    """
    following = tokens[np.minimum(logit_tokens + 1, len(tokens) - 1)]
    missed = (following != sampled).astype(np.int64)
    first = np.searchsorted(logit_row, logit_row)  # (L,) index of the first of the same row
    accepted = _since(first, missed) == 0
    if blocked is not None:
        accepted &= ~blocked & (_since(first, blocked.astype(np.int64)) == 0)
    if failed is not None:
        accepted &= ~failed[logit_row]
    starts = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(logit_row[accepted], minlength=rows), out=starts[1:])
    return starts, sampled[accepted].astype(np.int32)


def _since(first: Longs, flags: Longs) -> Longs:
    """(L,) the sum of `flags` (L,) from the first logits of the same row to before each."""
    earlier = np.cumsum(flags) - flags
    return earlier - earlier[first]


_SLOTS = 8
_TOKENS = 64
_NONE = -1


class TokenCounts:
    """Counts sampled tokens in the slots with penalties; costs nothing while there are none.

    Stored as the few tokens that were sampled, not as a count for every token of the vocabulary: a
    dense pass over 64 rows of 150,000 logits would cost more than the rest of sampling.

    Axes: S slots, K distinct tokens of the slot that has most, P rows with penalties.
    """

    def __init__(self, upload: Upload = torch.as_tensor) -> None:
        self._upload = upload
        self._ids = np.full((_SLOTS, _TOKENS), _NONE, np.int32)  # (S, K)
        self._counts = np.zeros((_SLOTS, _TOKENS), np.float32)  # (S, K)
        self._distinct = np.zeros(_SLOTS, np.int64)  # (S,)

    def begin(self, penalties: Penalties) -> None:
        """Reset the counts of slots whose requests are new."""
        starts = penalties.begun_starts.tolist()
        for index, slot in enumerate(penalties.begun.tolist()):
            outputs = penalties.begun_ids[starts[index] : starts[index + 1]]
            ids, counts = np.unique(outputs, return_counts=True)
            self._make_room(slot, len(ids))
            self._ids[slot] = _NONE
            self._counts[slot] = 0
            self._ids[slot, : len(ids)] = ids
            self._counts[slot, : len(ids)] = counts
            self._distinct[slot] = len(ids)

    def apply(
        self,
        ops: Ops,
        logits: Tensor,
        logit_row: Longs,
        tokens: Ints,
        plan: StepPlan,
        penalties: Penalties,
    ) -> None:
        """Penalise sampled tokens, and drafts before the logits of a verify row, in place."""
        factor = np.full(len(plan.slot), _NONE, np.int64)
        factor[penalties.rows] = np.arange(len(penalties.rows))
        places = np.flatnonzero(factor[logit_row] >= 0)  # (G,) rows of logits
        row, factor = logit_row[places], factor[logit_row[places]]
        slots = plan.slot[row]
        drafts = places - np.searchsorted(logit_row, row)  # of the row, before the logits
        width = int(self._distinct[slots].max(initial=0))
        ids, counts = self._ids[slots, :width], self._counts[slots, :width]  # (G, width)
        if longest := int(drafts.max(initial=0)):
            ids, counts = _with_drafts(ids, counts, plan.query_start[row], drafts, tokens, longest)
        which, column = np.nonzero(counts)
        if not len(which):
            return
        ops.penalize(
            logits,
            self._upload(places[which]),
            self._upload(ids[which, column].astype(np.int64)),
            self._upload(counts[which, column]),
            self._upload(penalties.frequency[factor[which]]),
            self._upload(penalties.presence[factor[which]]),
            self._upload(penalties.repetition[factor[which]]),
        )

    def count(self, slots: Ints, token_ids: Ints) -> None:
        """Count one more token a slot. slots, token_ids (P,); each slot occurs once."""
        width = int(self._distinct[slots].max(initial=0))
        known = self._ids[slots, :width] == token_ids[:, np.newaxis]  # (P, width)
        row, column = np.nonzero(known)
        self._counts[slots[row], column] += 1
        fresh = np.ones(len(slots), np.bool_)
        fresh[row] = False
        new = slots[fresh]
        if len(new) == 0:
            return
        self._make_room(0, width + 1)
        at = self._distinct[new]
        self._ids[new, at] = token_ids[fresh]
        self._counts[new, at] = 1
        self._distinct[new] = at + 1

    def _make_room(self, slot: int, tokens: int) -> None:
        slots_now, tokens_now = self._ids.shape
        if slot < slots_now and tokens <= tokens_now:
            return
        shape = (max(slots_now, 2 * slot), max(tokens_now, 2 * tokens))
        ids, counts = np.full(shape, _NONE, np.int32), np.zeros(shape, np.float32)
        distinct = np.zeros(shape[0], np.int64)
        ids[:slots_now, :tokens_now] = self._ids
        counts[:slots_now, :tokens_now] = self._counts
        distinct[:slots_now] = self._distinct
        self._ids, self._counts, self._distinct = ids, counts, distinct


def _with_drafts(
    ids: Ints, counts: Floats, starts: Ints, drafts: Ints, tokens: Ints, longest: int
) -> tuple[Ints, Floats]:
    """Counts (G, K) with `drafts` (G,) more tokens each: those after the token at `starts` (G,)."""
    ids = np.concatenate([ids, np.full((len(ids), longest), _NONE, np.int32)], axis=1)
    counts = np.concatenate([counts, np.zeros((len(counts), longest), np.float32)], axis=1)
    width = ids.shape[1] - longest
    for place in np.flatnonzero(drafts).tolist():
        start = starts.item(place) + 1
        for token in tokens[start : start + drafts.item(place)].tolist():
            known = np.flatnonzero((ids[place] == token) & (counts[place] > 0))
            column = (
                known.item(0) if len(known) else width + np.count_nonzero(counts[place, width:])
            )
            ids[place, column] = token
            counts[place, column] += 1
    return ids, counts


def _ints(tokens: Tensor) -> Ints:
    return tokens.cpu().numpy().astype(np.int32)
