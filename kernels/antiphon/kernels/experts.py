"""Sorting tokens by expert and combining the results, around the experts' linears.

Axes: T tokens, K experts of a token, N = T * K or fewer rows, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from antiphon.kernels.op import kernel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SortedByExpert:
    """Rows sorted by expert.

    Attributes:
        pair: (N,) the pair (token, choice) of a row: token * K + choice. Rows of one expert keep
            the order of their tokens.
        bounds: Expert e of the range has rows bounds[e] up to bounds[e + 1].
    """

    pair: Tensor
    bounds: list[int]


def sort_by_expert(experts: Tensor, first: int, count: int) -> SortedByExpert:
    """Sort the (token, expert) pairs whose expert is one of `count` from `first` on.

    experts (T, K) int64
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    borders = torch.arange(first, first + count + 1, device=flat.device)
    bounds: NDArray[np.int64] = torch.searchsorted(flat[order], borders).cpu().numpy()
    return SortedByExpert(order[int(bounds[0]) : int(bounds[-1])], (bounds - bounds[0]).tolist())


@kernel("moe.combine", invariant=True)
def combine(rows: Tensor, pair: Tensor, shares: Tensor) -> Tensor:
    """Sum the outputs of each token's experts, weighted.

    A pair without a row is skipped: another rank has its expert. The sum is taken in float32, in
    the order of a token's choices, so it does not depend on the rest of the batch.

    rows (N, D); pair (N,) int64; shares (T, K) float32  ->  (T, D), dtype of rows
    """
    tokens, choices = shares.shape
    spread = rows.new_zeros(tokens * choices, rows.shape[1])
    spread = spread.index_copy_(0, pair, rows).view(tokens, choices, -1)
    total = spread[:, 0].float() * shares[:, :1]
    for choice in range(1, choices):
        total += spread[:, choice].float() * shares[:, choice : choice + 1]
    return total.to(rows.dtype)
