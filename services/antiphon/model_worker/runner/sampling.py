"""Sampling: the token of each row of logits depends on its row's parameters and on nothing else.

Axes: R rows, L rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.sampling import Purpose, uniform
from antiphon.model_worker.runner.errors import PlanRefused
from antiphon.model_worker.runner.penalties import TokenCounts
from antiphon.wire.sampling import TEMPERATURE_MIN

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.model_worker.batching.plan import Ints, Longs, SamplingColumns, StepPlan


class Sampler:
    """Samples tokens on one rank; every rank samples the same."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._random_rows = TokenCounts()

    def process_logits(
        self, plan: StepPlan, logit_row: Longs, logits: Tensor
    ) -> NDArray[np.bool_] | None:
        """Apply penalties, masks and biases to the logits, in place and in this order.

        logits (L, V) float32, finite; logit_row (L,) the plan's row of each, ascending
        ->  which rows of the plan have no token left to sample, (R,); None if certainly none

        Raises:
            PlanRefused: A row that verifies several draft tokens has logits processors.
        """
        if plan.penalties is not None:
            self._random_rows.begin(plan.penalties)
            places = _places(plan.step, logit_row, plan.penalties.rows)
            slots = plan.slot[plan.penalties.rows]
            self._random_rows.apply(self._ops, logits, places, slots, plan.penalties)
        if plan.token_masks is not None:
            assert plan.token_mask_rows is not None, "masks without rows"
            places = _places(plan.step, logit_row, plan.token_mask_rows)
            self._ops.mask(logits, torch.as_tensor(places), torch.as_tensor(plan.token_masks))
        if plan.biases is not None:
            places = _places(plan.step, logit_row, plan.biases.rows)
            ids = torch.as_tensor(plan.biases.token_ids.astype(np.int64))
            values = torch.as_tensor(plan.biases.values)
            self._ops.bias(logits, torch.as_tensor(places), ids, values)
        if plan.token_masks is None and plan.biases is None:
            return None
        blocked = np.zeros(len(plan.slot), np.bool_)
        nothing = torch.isneginf(logits.amax(dim=-1)).cpu().numpy()
        blocked[logit_row[nothing]] = True
        return blocked

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
            return self._sample(columns, logits, rows, positions)
        tokens = self._greedy(logits) if argmax is None else argmax
        random_rows = np.flatnonzero(random)
        if len(random_rows):
            some = logits[torch.as_tensor(random_rows)]
            tokens[random_rows] = self._sample(
                columns, some, rows[random_rows], positions[random_rows]
            )
        return tokens

    def count(self, plan: StepPlan, starts: Ints, token_ids: Ints) -> None:
        """Count the accepted tokens of rows with penalties, row r `[starts[r], starts[r + 1])`."""
        if plan.penalties is None:
            return
        rows = plan.penalties.rows
        accepted = starts[rows + 1] - starts[rows]
        for number in range(int(accepted.max(initial=0))):
            more = rows[accepted > number]
            self._random_rows.count(plan.slot[more], token_ids[starts[more] + number])

    def _greedy(self, logits: Tensor) -> Ints:
        return _ints(self._ops.argmax(logits))

    def _sample(
        self, columns: SamplingColumns, logits: Tensor, rows: Longs, positions: Longs
    ) -> Ints:
        noise = uniform(columns.seed[rows], columns.choice[rows], positions, Purpose.SAMPLE)
        tokens = self._ops.sample(
            logits,
            torch.as_tensor(noise),
            *map(torch.as_tensor, columns.filters(rows)),
        )
        return _ints(tokens)


def is_random(columns: SamplingColumns) -> NDArray[np.bool_]:
    """Which rows are sampled at random, (R,); the others take the argmax."""
    return (columns.temperature >= TEMPERATURE_MIN) & (columns.top_k != 1)


def changes_logits(plan: StepPlan) -> bool:
    """Whether a plan has penalties, masks or biases."""
    return not (plan.penalties is None and plan.token_masks is None and plan.biases is None)


def greedy(columns: SamplingColumns) -> bool:
    """Whether each row takes the argmax."""
    return not any(columns.temperature.tolist())


def _ints(tokens: Tensor) -> Ints:
    return tokens.numpy().astype(np.int32)


def _places(step: int, logit_row: Longs, rows: Ints) -> Longs:
    """The index in the logits of each of these rows of the plan."""
    first = np.searchsorted(logit_row, rows)
    if (np.searchsorted(logit_row, rows, "right") != first + 1).any():
        raise PlanRefused(f"step {step}: logits processors do not support draft tokens")
    return first
