"""The small operations between linears and attention, in C++: csrc/elementwise.h.

Each rounds where its reference rounds; they differ from it in the order in which a norm sums
squares and in the last bits of an exponential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.cpu import extension
from antiphon.kernels.kv import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.qk_norm_rope import QkNormWeights


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op `norm.rmsnorm`: (T, hidden)  ->  (T, hidden)."""
    return extension.load().rmsnorm(x, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op `norm.add_rmsnorm`: the normalised sum, and the sum."""
    return extension.load().add_rmsnorm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """The op `activation.silu_mul`: (T, 2 * width)  ->  (T, width)."""
    return extension.load().silu_mul(gate_up)


def finite_rows(values: Tensor) -> Tensor | None:
    """The op `rows.finite`: (R, N)  ->  (R,) bool, or None."""
    return extension.load().finite_rows(values)


def argmax(logits: Tensor) -> Tensor:
    """The op `sampling.greedy`: (L, V) float32  ->  (L,) int64."""
    return extension.load().argmax(logits)


def qk_norm_rope_store(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    norms: QkNormWeights | None,
    scales: KvScales = UNSCALED,
) -> Tensor:
    """The op `attention.heads`: (T, Q + 2 H, D)  ->  (T, Q, D)."""
    query, key, eps = norms if norms is not None else (None, None, 0.0)
    return extension.load().qk_norm_rope_store(
        heads, cos, sin, keys, values, places, query, key, eps, scales
    )
