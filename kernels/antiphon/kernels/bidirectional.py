"""Bidirectional attention, with all tokens of a row in the same forward pass: no KV cache.

Axes: T tokens of all rows, R rows, Q query heads, H kv heads, G query heads a kv head, D head size,
N queries and M keys of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.op import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

QUERIES_MAX = 256
"""Queries of a windowed row that run at once, over the keys that any of them attends to."""


@dataclass(frozen=True, slots=True)
class NoCache:
    """The cache spec of a layer with bidirectional attention, which caches nothing."""


@kernel("attention.whole")
def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, window: int | None
) -> Tensor:
    """Softmax attention of each token over all tokens of its row, or those in its window.

    q (T, Q, D); k, v (T, H, D); lengths (R,) tokens of each row; rows follow each other; window: a
    token attends to itself and window - 1 tokens on each side  ->  (T, Q, D)

    Each row runs alone: padding short ones to long ones would cost more than calls.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for length in lengths:
        row = slice(start, start + length)
        for queries, keys, mask in _pieces(length, window):
            mixed = _attend(q[row][queries], k[row][keys], v[row][keys], mask, scale)
            out[row][queries] = mixed
        start += length
    return out


def _pieces(length: int, window: int | None) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries of a row, the keys in their windows, and the mask, (N, M) bool; None: no mask."""
    if window is None or window >= length:
        yield slice(0, length), slice(0, length), None
        return
    for first in range(0, length, QUERIES_MAX):
        last = min(first + QUERIES_MAX, length)
        begin, end = max(0, first - window + 1), min(length, last + window - 1)
        distance = torch.arange(first, last)[:, None] - torch.arange(begin, end)
        yield slice(first, last), slice(begin, end), distance.abs() < window


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    count, heads, size = len(q), k.shape[1], q.shape[2]
    shared = q.shape[1] // heads
    grouped = q.view(count, heads, shared, size).permute(1, 2, 0, 3).reshape(1, heads, -1, size)
    seen = None if mask is None else mask.to(q.device).repeat(shared, 1)
    mixed = F.scaled_dot_product_attention(
        grouped, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=seen, scale=scale
    )
    return mixed.view(heads, shared, count, size).permute(2, 0, 1, 3).reshape(q.shape)
