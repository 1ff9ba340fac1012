"""Tokens in the order of their experts, and back: what surrounds the experts' own linears.

Axes: T tokens, K experts that a token goes to, N = T * K or fewer rows, D hidden size.
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
    """Where the rows of each expert are, once rows lie in the order of their experts.

    Attributes:
        pair: (N,) which of the pairs (token, choice) a row is: token * K + choice. Rows of one
            expert keep the order of their tokens.
        bounds: Expert e of those asked for has rows bounds[e] up to bounds[e + 1].
    """

    pair: Tensor
    bounds: list[int]


def sort_by_expert(experts: Tensor, first: int, count: int) -> SortedByExpert:
    """Sort the pairs of a pass whose expert is one of `count` from `first` on.

    experts (T, K) int64
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    borders = torch.arange(first, first + count + 1, device=flat.device)
    found: NDArray[np.int64] = torch.searchsorted(flat[order], borders).cpu().numpy()
    return SortedByExpert(order[int(found[0]) : int(found[-1])], (found - found[0]).tolist())


@kernel("moe.combine", invariant=True)
def combine(rows: Tensor, pair: Tensor, shares: Tensor) -> Tensor:
    """Sum what a token's experts made of it, each by its share.

    A pair that has no row counts nothing: another rank has its expert. The sum is taken in float32,
    in the order of a token's choices, so it does not depend on who else is in the pass.

    rows (N, D); pair (N,) int64; shares (T, K) float32  ->  (T, D), dtype of rows
    """
    tokens, choices = shares.shape
    spread = rows.new_zeros(tokens * choices, rows.shape[1])
    spread = spread.index_copy_(0, pair, rows).view(tokens, choices, -1)
    total = spread[:, 0].float() * shares[:, :1]
    for choice in range(1, choices):
        total += spread[:, choice].float() * shares[:, choice : choice + 1]
    return total.to(rows.dtype)
