"""Paged attention in C++: csrc/attention.h."""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType

from antiphon.kernels.cpu import extension
from antiphon.kernels.kv import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata

CompiledMetadata = NewType("CompiledMetadata", object)
"""`Rows` of the CPU extension: validated, and split into tasks for its threads."""


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    scales: KvScales = UNSCALED,
) -> Tensor:
    """The op `attention.paged`: (T, G * H, D)  ->  (T, G * H, D)."""
    return extension.load().paged_attention(q, keys, values, rows.compiled, scale, scales)
