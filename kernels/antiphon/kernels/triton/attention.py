"""Attention over the paged KV cache: a tile of a row's queries, packed by kv head, over its keys.

Rows of one query are decoded: their keys are split, so that a few long rows keep all processors
busy, and the parts are merged by their log-sum-exp. The splits begin at multiples of a number of
tokens that follows from the length of a row and how many splits there may be: what a row gets does
not depend on the length of other rows. Splits behind its end have nothing.

Axes: T tokens, Q query heads, H kv heads, G query heads a kv head, D head size, N tiles, S splits,
M queries of a tile times G.

Source: Dao 2023, arXiv:2307.08691; Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.kv import UNSCALED, KvScales
from antiphon.kernels.triton import latent
from antiphon.kernels.triton.activation import tanh
from antiphon.kernels.triton.launch import launch, power_of_2
from antiphon.kernels.triton.rows import SPLIT_TOKENS, Tiles, queries_of_tile

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata

KEYS = 64
"""Keys of a block, whatever the page size; the smallest that fills the matrix units."""
WIDE = 128
"""Above this head size a block has half the keys: two of them must fit in 99 KiB."""
TILE = 4096
DOT_ROWS_MIN = 16
WARP_NUMBERS = 128
"""Of float32, that the threads of a warp load at once with 128 bits each."""


@triton.jit(do_not_specialize=["row_count", "table_width", "splits"])
def paged_attention_kernel(
    q,
    keys,
    values,
    out,
    masses,
    sinks,
    table,
    tiles,
    rows,
    row_count,
    table_width,
    splits,
    scale,
    softcap,
    value_scale,
    PAGE_TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(rows + row)
    queries = tl.load(rows + row_count + row)
    length = tl.load(rows + 2 * row_count + row)
    own = tl.load(rows + 3 * row_count + row)
    packed = tl.arange(0, BLOCK_M)
    query = first + packed // GROUP
    used = (packed < BLOCK_Q * GROUP) & (query < queries)
    position = length - queries + query
    column = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + packed % GROUP
    token_head = (start + query).to(tl.int64) * (KV_HEADS * GROUP) + head
    place = token_head[:, None] * SIZE + column[None, :]
    wanted = used[:, None] & (column < SIZE)[None, :]
    x = tl.load(q + place, mask=wanted, other=0.0)

    # Nothing beyond the last query's position is read, nor before the first one's window.
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - queries + first - WINDOW + 1, 0)
    high = length - queries + tl.minimum(first + BLOCK_Q, queries)
    if SPLIT > 0:
        part_keys = tl.cdiv(tl.cdiv(length, splits), SPLIT) * SPLIT
        low = tl.maximum(low, split * part_keys)
        high = tl.minimum(high, (split + 1) * part_keys)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        there = (key >= low) & (key < high)
        entry = own.to(tl.int64) * table_width + key // PAGE_TOKENS
        page = tl.load(table + entry, mask=there, other=0)
        slot = (page.to(tl.int64) * KV_HEADS + kv_head) * SLOTS + key % PAGE_TOKENS
        cached = slot[:, None] * SIZE + column[None, :]
        stored = there[:, None] & (column < SIZE)[None, :]
        # Numbers of 8 bits become the queries' type in registers.
        k = tl.load(keys + cached, mask=stored, other=0.0).to(x.dtype)
        scores = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores * 1.4426950408889634, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A query that has seen no key yet would subtract infinities.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        mass = mass * shrink + tl.sum(weights, axis=1)
        v = tl.load(values + cached, mask=stored, other=0.0).to(x.dtype)
        added = tl.dot(weights.to(x.dtype), v, input_precision="ieee")
        mixed = mixed * shrink[:, None] + added
        peak = higher
    if SPLIT > 0:
        # (N, H, S, M, D) and (N, H, S, M), in float32
        part = ((tile * KV_HEADS + kv_head) * splits + split).to(tl.int64) * BLOCK_M + packed
        found = tl.where(mass > 0, mass, 1.0)
        there = wanted & (mass > 0)[:, None]
        tl.store(out + part[:, None] * SIZE + column[None, :], mixed / found[:, None], mask=there)
        tl.store(masses + part, tl.where(mass > 0, peak + tl.log2(found), -float("inf")), mask=used)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
            mass += tl.exp2(sink - peak)
        mixed = mixed / tl.where(used, mass, 1.0)[:, None] * value_scale
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    parts,
    masses,
    sinks,
    out,
    tiles,
    rows,
    splits,
    value_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(rows + tl.load(tiles + 2 * tile)).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    first = ((tile * KV_HEADS + head // GROUP) * splits).to(tl.int64) * BLOCK_M + head % GROUP
    part = first + split * BLOCK_M
    mass = tl.load(masses + part, mask=split < splits, other=-float("inf"))
    peak = tl.max(mass, axis=0)
    weights = tl.exp2(mass - peak)
    total = tl.sum(weights, axis=0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - peak)
    inside = (mass > -float("inf"))[:, None] & (column < SIZE)[None, :]
    mixed = tl.load(parts + part[:, None] * SIZE + column[None, :], mask=inside, other=0.0)
    result = tl.sum(mixed * weights[:, None], axis=0) / total * value_scale
    place = (token * (KV_HEADS * GROUP) + head) * SIZE + column
    tl.store(out + place, result.to(out.dtype.element_ty), mask=column < SIZE)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    scales: KvScales = UNSCALED,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `antiphon.kernels.attention.paged_attention`, for pages of rows."""
    q = q.contiguous()
    out = torch.empty_like(q)
    made = rows.on_device
    for tiles in (made.decoding, made.extending):
        if tiles is not None:
            _attend(q, keys, values, out, rows, tiles, scale, scales, softcap, sinks)
    return out


def paged_attention_fixed(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    scales: KvScales = UNSCALED,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `paged_attention`; the bits of a query do not depend on what else is in the pass.

    All rows are in tiles of one size, and their keys in one part: what a query adds up, and in
    which order, follows from its position, whether it is decoded or part of a prefill.
    """
    q = q.contiguous()
    out = torch.empty_like(q)
    made = rows.on_device
    queries = queries_of_tile(rows.shape.queries_per_head)
    for tiles in (made.decoding, made.extending):
        if tiles is not None:
            one_part = Tiles(tiles.tiles, queries, 1)
            _attend(q, keys, values, out, rows, one_part, scale, scales, softcap, sinks)
    return out


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    rows: AttentionMetadata,
    tiles: Tiles,
    scale: float,
    scales: KvScales,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    if keys is values:
        latent.attend(q, keys, out, rows, tiles, float(scale * scales.key), float(scales.value))
        return
    shape, made = rows.shape, rows.on_device
    heads, group, size = shape.heads, shape.queries_per_head, shape.head_size
    count, splits = len(tiles.tiles), tiles.splits
    block_m = max(DOT_ROWS_MIN, power_of_2(tiles.queries * group))
    parts, masses = out, out
    if splits > 1:
        space = torch.empty(
            (count * heads * splits * block_m, size + 1), dtype=torch.float32, device=q.device
        ).view(-1)
        masses, parts = space[: len(space) // (size + 1)], space[len(space) // (size + 1) :]
    block_d = max(16, power_of_2(size))
    large, narrow = block_m * block_d > TILE, keys.element_size() == 1
    launch(
        paged_attention_kernel,
        (count, heads, splits),
        q,
        keys,
        values,
        parts,
        masses,
        q if sinks is None else sinks,
        made.table,
        tiles.tiles,
        made.rows,
        made.rows.shape[1],
        made.table.shape[1],
        splits,
        float(scale * scales.key),
        1.0 if softcap is None else float(softcap),
        float(scales.value),
        # With fewer warps or stages, registers of a large tile are kept in memory, and on sm_120
        # those of keys of 8 bits.
        warps=8 if large or narrow else 4,
        stages=3 if large and block_d <= WIDE else 2,
        PAGE_TOKENS=shape.page_tokens,
        SLOTS=keys.shape[2],
        KV_HEADS=heads,
        GROUP=group,
        SIZE=size,
        BLOCK_Q=tiles.queries,
        BLOCK_M=block_m,
        BLOCK_N=KEYS if block_d <= WIDE else KEYS // 2,
        BLOCK_D=block_d,
        WINDOW=shape.window or 0,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        SPLIT=SPLIT_TOKENS if splits > 1 else 0,
    )
    if splits > 1:
        block_s = power_of_2(splits)
        launch(
            merge_kernel,
            (count, heads * group),
            parts,
            masses,
            q if sinks is None else sinks,
            out,
            tiles.tiles,
            made.rows,
            splits,
            float(scales.value),
            # More would have less than 128 bits of the parts to load, each.
            warps=max(1, min(4, block_s * block_d // WARP_NUMBERS)),
            KV_HEADS=heads,
            GROUP=group,
            SIZE=size,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
            BLOCK_S=block_s,
            SINKS=sinks is not None,
        )
