"""The store of latents, and attention over them as the keys and values of all query heads.

A latent is read once for a few heads, as a key and as a value. Its elements are split in two: as
many as the largest power of two, and the rest, so that a latent of 512 with a position of 64 needs
no padding. Those of 8 bits are read twice, and become numbers of the queries' dtype in registers.

Axes: T tokens, Q query heads, D elements of a latent with its position, N tiles, P parts of heads,
S splits, M queries of a tile times heads of a part.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; Dao et al. 2023, "Flash-Decoding for
long-context inference".
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.kv import FP8_MAX
from antiphon.kernels.triton.heads import as_cached
from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2, warps_of
from antiphon.kernels.triton.rows import SPLIT_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata
    from antiphon.kernels.triton.rows import Tiles

QUERIES = 16
"""Queries of a tile times heads of a part: the fewest that fill the matrix units, since each has a
whole latent in registers."""
KEYS = 32
"""Latents of a block: two blocks fit in 99 KiB."""
TILE = 2048
"""Elements that a program stores, if a latent has fewer."""


@triton.jit(do_not_specialize=["row_count", "table_width", "splits"])
def latent_kernel(
    q,
    pages,
    out,
    masses,
    table,
    tiles,
    rows,
    row_count,
    table_width,
    splits,
    scale,
    value_scale,
    PAGE_TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Some heads of a tile of a row's queries, over all its latents or a part of them."""
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(rows + row)
    queries = tl.load(rows + row_count + row)
    length = tl.load(rows + 2 * row_count + row)
    own = tl.load(rows + 3 * row_count + row)
    packed = tl.arange(0, BLOCK_M)
    query = first + packed // PART
    used = (packed < BLOCK_Q * PART) & (query < queries)
    position = length - queries + query
    column = tl.arange(0, BLOCK_D)
    rest = BLOCK_D + tl.arange(0, BLOCK_R)
    there_rest = (rest < SIZE)[None, :]
    place = (start + query).to(tl.int64) * HEADS + part * PART + packed % PART
    x = tl.load(q + place[:, None] * SIZE + column[None, :], mask=used[:, None], other=0.0)
    y = tl.load(
        q + place[:, None] * SIZE + rest[None, :], mask=used[:, None] & there_rest, other=0.0
    )

    # Nothing beyond the last query's position is read.
    low = 0
    high = length - queries + tl.minimum(first + BLOCK_Q, queries)
    if SPLIT > 0:
        part_keys = tl.cdiv(tl.cdiv(length, splits), SPLIT) * SPLIT
        low = split * part_keys
        high = tl.minimum(high, (split + 1) * part_keys)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    beside = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for begin in range(low, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        there = key < high
        entry = own.to(tl.int64) * table_width + key // PAGE_TOKENS
        page = tl.load(table + entry, mask=there, other=0)
        cached = (page.to(tl.int64) * SLOTS + key % PAGE_TOKENS) * SIZE
        k = tl.load(pages + cached[:, None] + column[None, :], mask=there[:, None], other=0.0)
        turned = tl.load(
            pages + cached[:, None] + rest[None, :], mask=there[:, None] & there_rest, other=0.0
        )
        scores = tl.dot(x, tl.trans(k).to(x.dtype), input_precision="ieee")
        scores = tl.dot(y, tl.trans(turned).to(x.dtype), scores, input_precision="ieee") * scale
        seen = there[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores * 1.4426950408889634, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A query that has seen no latent yet would subtract infinities.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        mass = mass * shrink + tl.sum(weights, axis=1)
        weights = weights.to(x.dtype)
        if NARROW:
            # As values, bytes go to the matrix units in another order: what one load has for both
            # is not copied ahead.
            k = tl.load(
                pages + cached[:, None] + column[None, :],
                mask=there[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
            turned = tl.load(
                pages + cached[:, None] + rest[None, :],
                mask=there[:, None] & there_rest,
                other=0.0,
                eviction_policy="evict_first",
            )
        mixed = tl.dot(weights, k.to(x.dtype), mixed * shrink[:, None], input_precision="ieee")
        beside = tl.dot(
            weights, turned.to(x.dtype), beside * shrink[:, None], input_precision="ieee"
        )
        peak = higher
    found = tl.where(mass > 0, mass, 1.0)
    if SPLIT > 0:
        # (N, P, S, M, D) and (N, P, S, M), in float32
        place = ((tile * (HEADS // PART) + part) * splits + split).to(tl.int64) * BLOCK_M
        place += packed
        tl.store(masses + place, tl.where(mass > 0, peak + tl.log2(found), -float("inf")))
        used = used & (mass > 0)
    else:
        found = found / value_scale
    target = out + place[:, None] * SIZE
    kind = out.dtype.element_ty
    tl.store(target + column[None, :], (mixed / found[:, None]).to(kind), mask=used[:, None])
    made = (beside / found[:, None]).to(kind)
    tl.store(target + rest[None, :], made, mask=used[:, None] & there_rest)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    parts,
    masses,
    out,
    tiles,
    rows,
    splits,
    value_scale,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One head of a row that is decoded, from its splits."""
    tile, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(rows + tl.load(tiles + 2 * tile)).to(tl.int64)
    first = ((tile * (HEADS // PART) + head // PART) * splits).to(tl.int64) * BLOCK_M + head % PART
    split = tl.arange(0, BLOCK_S)
    mass = tl.load(masses + first + split * BLOCK_M, mask=split < splits, other=-float("inf"))
    peak = tl.max(mass, axis=0)
    total = tl.sum(tl.exp2(mass - peak), axis=0)
    column = tl.arange(0, BLOCK_D)
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for number in range(splits):
        part = first + number * BLOCK_M
        one = tl.load(masses + part) + tl.zeros([BLOCK_D], tl.float32)
        inside = (column < SIZE) & (one > -float("inf"))
        made = tl.load(parts + part * SIZE + column, mask=inside, other=0.0)
        mixed += made * tl.exp2(one - peak)
    place = (token * HEADS + head) * SIZE + column
    tl.store(
        out + place, (mixed / total * value_scale).to(out.dtype.element_ty), mask=column < SIZE
    )


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(
    latents,
    cos,
    sin,
    pages,
    places,
    tokens,
    scale,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MAX: tl.constexpr,
):
    """Latents of some tokens, whose positions are rotated on the way."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    known = token < tokens
    source = latents + (token * (LATENT + ROTATED))[:, None]
    # There is one head: slots of all pages follow each other.
    slot = tl.load(places + token, mask=known, other=0)
    target = pages + (slot * (LATENT + ROTATED))[:, None]
    kind = pages.dtype.element_ty
    column = tl.arange(0, BLOCK_D)
    inside = known[:, None] & (column < LATENT)[None, :]
    plain = tl.load(source + column[None, :], mask=inside, other=0.0)
    tl.store(target + column[None, :], as_cached(plain, scale, kind, MAX), mask=inside)
    column = tl.arange(0, BLOCK_R)
    inside = known[:, None] & (column < ROTATED)[None, :]
    half = ROTATED // 2
    other = tl.where(column < half, column + half, column - half)
    x = tl.load(source + LATENT + column[None, :], mask=inside, other=0.0)
    y = tl.load(source + LATENT + other[None, :], mask=inside, other=0.0)
    angle = (token * ROTATED)[:, None] + column[None, :]
    c = tl.load(cos + angle, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    turned = (x.to(tl.float32) * c + y.to(tl.float32) * s).to(x.dtype)
    tl.store(target + LATENT + column[None, :], as_cached(turned, scale, kind, MAX), mask=inside)


def attend(
    q: Tensor,
    pages: Tensor,
    out: Tensor,
    rows: AttentionMetadata,
    tiles: Tiles,
    scale: float,
    value_scale: float,
) -> None:
    """Attend to pages of latents (P, 1, S, D), causal: q (T, Q, D)  ->  `out`, of its shape.

    `scale` multiplies scores, and has the scale of latents of 8 bits in it; `value_scale` is theirs
    as values.
    """
    shape, made = rows.shape, rows.on_device
    heads, size = shape.queries_per_head, shape.head_size
    count, splits = len(tiles.tiles), tiles.splits
    part = math.gcd(heads, max(1, QUERIES // tiles.queries))
    block_m = max(QUERIES, power_of_2(tiles.queries * part))
    target, masses = out, out
    if splits > 1:
        space = torch.empty(
            (count * (heads // part) * splits * block_m, size + 1),
            dtype=torch.float32,
            device=q.device,
        ).view(-1)
        masses, target = space[: len(space) // (size + 1)], space[len(space) // (size + 1) :]
    block_d = max(16, 1 << (size.bit_length() - 1))
    launch(
        latent_kernel,
        (count, heads // part, splits),
        q,
        pages,
        target,
        masses,
        made.table,
        tiles.tiles,
        made.rows,
        made.rows.shape[1],
        made.table.shape[1],
        splits,
        scale,
        value_scale,
        # With fewer, registers of latents of 8 bits are kept in memory on sm_90.
        warps=8 if pages.element_size() == 1 else 4,
        stages=2,
        PAGE_TOKENS=shape.page_tokens,
        SLOTS=pages.shape[2],
        HEADS=heads,
        PART=part,
        SIZE=size,
        BLOCK_Q=tiles.queries,
        BLOCK_M=block_m,
        BLOCK_N=KEYS,
        BLOCK_D=block_d,
        BLOCK_R=max(16, power_of_2(max(1, size - block_d))),
        SPLIT=SPLIT_TOKENS if splits > 1 else 0,
        NARROW=pages.element_size() == 1,
    )
    if splits > 1:
        launch(
            merge_kernel,
            (count, heads),
            target,
            masses,
            out,
            tiles.tiles,
            made.rows,
            splits,
            value_scale,
            HEADS=heads,
            PART=part,
            SIZE=size,
            BLOCK_M=block_m,
            BLOCK_D=power_of_2(size),
            BLOCK_S=power_of_2(splits),
        )


def store_latents(
    latents: Tensor, cos: Tensor, sin: Tensor, pages: Tensor, places: Tensor, scale: float
) -> None:
    """As `antiphon.kernels.latent.store_latents`, for pages of rows."""
    tokens, size = latents.shape
    rotated = cos.shape[-1]
    block = power_of_2(size - rotated)
    each = max(1, TILE // block)
    launch(
        store_kernel,
        (ceil_div(tokens, each),),
        latents.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        pages,
        places,
        tokens,
        float(scale),
        warps=warps_of(each * block * latents.element_size()),
        LATENT=size - rotated,
        ROTATED=rotated,
        TOKENS=each,
        BLOCK_D=block,
        BLOCK_R=power_of_2(rotated),
        MAX=FP8_MAX.get(pages.dtype, 0.0),
    )
