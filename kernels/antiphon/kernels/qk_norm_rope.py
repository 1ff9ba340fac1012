"""QK norm, RoPE and the KV cache store, between the QKV projection and attention."""

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
    """Weights of QK norms, which normalise each query and key head separately, (D,) both."""

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
    """Apply QK norm and RoPE to queries and keys, and write keys and values to the cache.

    Axes: T tokens, Q query heads, P pages, S tokens a page, H kv heads, D head size.
    heads (T, Q + 2 H, D), queries before keys before values; cos, sin (T, 1, D) from `cos_sin`;
    keys, values (P, S, H, D), mutated, and their scales; places (T,) int64, page * S + offset
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
