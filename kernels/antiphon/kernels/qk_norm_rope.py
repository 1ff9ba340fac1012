"""What becomes of the heads of a pass between their projection and attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from antiphon.kernels.cpu.backend import cpu
from antiphon.kernels.kv import UNSCALED, KvScales, store_kv
from antiphon.kernels.norm import rmsnorm
from antiphon.kernels.op import kernel
from antiphon.kernels.rotary import apply_rotary


class QkNormWeights(NamedTuple):
    """Weights that normalise each query and key head by itself, (D,) both."""

    query: Tensor
    key: Tensor
    eps: float


@kernel("attention.heads", cpu("antiphon.kernels.cpu.elementwise:qk_norm_rope_store"))
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
    """Normalise and rotate queries and keys, and keep keys and values in the cache.

    Axes: T tokens, Q query heads, P pages, S tokens a page, H kv heads, D head size.
    heads (T, Q + 2 H, D), queries before keys before values; cos, sin (T, 1, D) as `angles` makes
    them; keys, values (P, S, H, D), mutated, and what they are multiples of; places (T,) int64,
    page * S + offset
    ->  the queries (T, Q, D)
    """
    kv_heads = keys.shape[2]
    queries = heads.shape[1] - 2 * kv_heads
    q, k = heads[:, :queries], heads[:, queries : queries + kv_heads]
    if norms is not None:
        q = rmsnorm.reference(q, norms.query, norms.eps)
        k = rmsnorm.reference(k, norms.key, norms.eps)
    rotated = apply_rotary(torch.cat((q, k), dim=1), cos, sin)
    store_kv(rotated[:, queries:], heads[:, queries + kv_heads :], keys, values, places, scales)
    return rotated[:, :queries]
