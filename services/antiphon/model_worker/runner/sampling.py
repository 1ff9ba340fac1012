"""Which token each row of logits gives: by its row's columns, and by nothing else in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.philox import Purpose, uniform
from antiphon.wire.sampling import TEMPERATURE_MIN

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.model_worker.batching.plan import Longs, SamplingColumns


def sample(
    ops: Ops, logits: Tensor, columns: SamplingColumns, rows: Longs, positions: Longs
) -> Tensor:
    """Draw a token a row of logits.

    Axes: L rows of logits, V vocabulary.
    logits (L, V) float32; rows (L,) the plan's row of each; positions (L,) the index in its
    sequence of the token being drawn  ->  (L,) int64
    """
    temperature, top_k = columns.temperature[rows], columns.top_k[rows]
    random = (temperature >= TEMPERATURE_MIN) & (top_k != 1)
    if not random.any():
        return ops.greedy(logits)
    if random.all():
        return _draw(ops, logits, columns, rows, positions)
    tokens = ops.greedy(logits)
    drawn = np.flatnonzero(random)
    index = torch.as_tensor(drawn)
    tokens[index] = _draw(ops, logits[index], columns, rows[drawn], positions[drawn])
    return tokens


def _draw(
    ops: Ops, logits: Tensor, columns: SamplingColumns, rows: Longs, positions: Longs
) -> Tensor:
    noise = uniform(columns.seed[rows], columns.choice[rows], positions, Purpose.SAMPLE)
    return ops.draw(
        logits,
        torch.as_tensor(noise),
        torch.as_tensor(columns.temperature[rows]),
        torch.as_tensor(columns.top_k[rows].astype(np.int64)),
        torch.as_tensor(columns.top_p[rows]),
        torch.as_tensor(columns.min_p[rows]),
    )
