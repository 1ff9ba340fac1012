"""Bidirectional attention of whole texts: a tile of a text's queries over all its tokens.

A tile begins at a multiple of its size in its text, and its keys come in blocks of one size: what a
token gets does not depend on the texts beside it.

Axes: T tokens, Q query heads, H kv heads, D head size, N tiles, M queries of a tile.

Source: Dao 2023, arXiv:2307.08691.
"""

# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.launch import launch, power_of_2
from antiphon.kernels.triton.rows import TEXT_QUERIES

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.attention import TextRows

KEYS = 64
"""Keys of a block."""
WIDE = 128
"""Above this head size a block has half the keys: two of them must fit in 99 KiB."""


@triton.jit
def whole_kernel(
    q,
    k,
    v,
    out,
    tiles,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(tiles + 3 * tile).to(tl.int64)
    length = tl.load(tiles + 3 * tile + 1)
    first = tl.load(tiles + 3 * tile + 2)
    query = first + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    place = ((start + query) * HEADS + head)[:, None] * SIZE + column[None, :]
    wanted = (query < length)[:, None] & (column < SIZE)[None, :]
    x = tl.load(q + place, mask=wanted, other=0.0)
    low, high = 0, length
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(first + BLOCK_M + WINDOW - 1, length)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(low, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        there = key < high
        cached = ((start + key) * KV_HEADS + head // (HEADS // KV_HEADS))[:, None] * SIZE
        stored = there[:, None] & (column < SIZE)[None, :]
        keys = tl.load(k + cached + column[None, :], mask=stored, other=0.0)
        scores = tl.dot(x, tl.trans(keys), input_precision="ieee") * scale
        seen = there[None, :] & (query >= 0)[:, None]
        if WINDOW > 0:
            distance = query[:, None] - key[None, :]
            seen = seen & (distance < WINDOW) & (distance > -WINDOW)
        scores = tl.where(seen, scores * 1.4426950408889634, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A query that has seen no key yet would subtract infinities.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        mass = mass * shrink + tl.sum(weights, axis=1)
        values = tl.load(v + cached + column[None, :], mask=stored, other=0.0)
        added = tl.dot(weights.to(x.dtype), values, input_precision="ieee")
        mixed = mixed * shrink[:, None] + added
        peak = higher
    mixed = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=wanted)


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: TextRows, scale: float, window: int | None
) -> Tensor:
    """As `antiphon.kernels.attention.bidirectional_attention`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, tiles = torch.empty_like(q), rows.tiles
    (_, heads, size), block_d = q.shape, max(16, power_of_2(q.shape[2]))
    launch(
        whole_kernel,
        (len(tiles), heads),
        q,
        k,
        v,
        out,
        tiles,
        float(scale),
        # With fewer, registers are kept in memory.
        warps=4 if block_d < TEXT_QUERIES else 8,
        stages=2,
        HEADS=heads,
        KV_HEADS=k.shape[1],
        SIZE=size,
        WINDOW=window or 0,
        BLOCK_M=TEXT_QUERIES,
        BLOCK_N=KEYS if block_d <= WIDE else KEYS // 2,
        BLOCK_D=block_d,
    )
    return out
