"""Finding rows that hold a NaN or an infinity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from antiphon.kernels.cpu.backend import cpu
from antiphon.kernels.op import kernel


@kernel("rows.finite", cpu("antiphon.kernels.cpu.elementwise:finite_rows"), invariant=True)
def finite_rows(values: Tensor) -> Tensor | None:
    """Which rows hold finite numbers only. values (R, N)  ->  (R,) bool; None: all do."""
    # One sum is an order cheaper than looking at each number; it is finite but for trouble.
    if math.isfinite(float(values.sum(dtype=torch.float32))):
        return None
    return torch.isfinite(values).all(dim=-1)
