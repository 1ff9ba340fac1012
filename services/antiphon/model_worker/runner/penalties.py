"""How often each request has sampled each token, by slot: the input of penalties.

Stored as the few tokens that were sampled, not as a count for every token of the vocabulary: a
dense pass over 64 rows of 150,000 logits would cost more than the rest of sampling.

Axes: S slots, K distinct tokens of the slot that has most, P rows with penalties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.model_worker.batching.plan import Ints, Longs, Penalties

_SLOTS = 8
_TOKENS = 64
_NONE = -1


class TokenCounts:
    """Counts sampled tokens in the slots with penalties; costs nothing while there are none."""

    def __init__(self) -> None:
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
            self._ids[slot, : len(ids)] = ids
            self._counts[slot, : len(ids)] = counts
            self._distinct[slot] = len(ids)

    def apply(
        self, ops: Ops, logits: Tensor, places: Longs, slots: Ints, penalties: Penalties
    ) -> None:
        """Penalise sampled tokens, in place. `places` (P,) are rows of the logits."""
        width = int(self._distinct[slots].max(initial=0))
        if width == 0:
            return
        ids = self._ids[slots, :width]  # (P, width)
        row, column = np.nonzero(ids >= 0)
        ops.penalize(
            logits,
            torch.as_tensor(places[row]),
            torch.as_tensor(ids[row, column].astype(np.int64)),
            torch.as_tensor(self._counts[slots[row], column]),
            torch.as_tensor(penalties.frequency[row]),
            torch.as_tensor(penalties.presence[row]),
            torch.as_tensor(penalties.repetition[row]),
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
