"""Detects rows with a NaN or infinity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from antiphon.kernels.cpu.backend import cpu
from antiphon.kernels.op import kernel


@kernel("rows.finite", cpu("antiphon.kernels.cpu.elementwise:finite_rows"), invariant=True)
def finite_rows(values: Tensor) -> Tensor | None:
    """Which rows contain only finite values. values (R, N)  ->  (R,) bool; None: all do."""
    # One sum is an order cheaper than checking each element, and nearly always finite.
    if math.isfinite(float(values.sum(dtype=torch.float32))):
        return None
    return torch.isfinite(values).all(dim=-1)
