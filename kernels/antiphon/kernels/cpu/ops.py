"""The operations of the CPU extension: csrc/elementwise.h and csrc/attention.h.

Each rounds where its reference rounds; they differ from it in the order in which a norm sums
squares and in the last bits of an exponential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.cpu import extension
from antiphon.kernels.kv import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata
    from antiphon.kernels.rotary import QkNormWeights


def __getattr__(name: str) -> object:
    """An operation that takes its arguments as they are: the extension's own function."""
    return getattr(extension.load(), name)


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
    query, key, eps = norms if norms is not None else (None, None, 0.0)
    return extension.load().qk_norm_rope_store(
        heads, cos, sin, keys, values, places, query, key, eps, scales
    )


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    scales: KvScales = UNSCALED,
) -> Tensor:
    return extension.load().paged_attention(q, keys, values, rows.compiled, scale, scales)
