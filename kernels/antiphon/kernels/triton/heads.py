"""QK norm, RoPE and the KV cache store: one program has all heads of a token, or of a few."""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.kv import FP8_MAX, UNSCALED, KvScales
from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.rotary import QkNormWeights

TILE = 8192
"""Elements of a program, if a token has fewer."""
_KINDS = {"rms": 1, "rms_wide": 2, "layer": 3}


@triton.jit
def _group_mean(values, mask, in_group, count, OVER_TOKEN: tl.constexpr):
    """The mean of each head, or of all heads of a group, (heads,)."""
    sums = tl.sum(tl.where(mask, values, 0.0), axis=1)
    if OVER_TOKEN:
        whole = tl.sum(tl.where(in_group, sums, 0.0), axis=0)
        sums = tl.where(in_group, whole, 0.0)
    return sums / count


@triton.jit
def _normed(values, mean, scale, weight, bias, index, mask, KIND: tl.constexpr, BIAS: tl.constexpr):
    """Elements (heads, D) of a group, by its mean and scale (heads,), with weights at `index`."""
    factor = tl.load(weight + index, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    # One return: a compiler that sees several wants them to have one dtype.
    if KIND == 3:
        unit = (wide - mean[:, None]) * scale[:, None] * factor.to(tl.float32)
        if BIAS:
            unit += tl.load(bias + index, mask=mask, other=0.0).to(tl.float32)
        normed = unit.to(values.dtype)
    elif KIND == 2:
        normed = (wide * scale[:, None] * factor).to(values.dtype)
    else:
        normed = (wide * scale[:, None]).to(values.dtype) * factor
    return normed


@triton.jit
def _normalised(
    x,
    y,
    weight,
    bias,
    inside,
    mine,
    member,
    column,
    other,
    eps,
    SIZE: tl.constexpr,
    MEMBERS: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    OVER_TOKEN: tl.constexpr,
):
    """Elements (heads, D) and those that they are rotated with; the group's are normalised."""
    mask = inside & mine[:, None]
    count = SIZE * MEMBERS if OVER_TOKEN else SIZE
    wide = x.to(tl.float32)
    mean = tl.zeros_like(tl.sum(wide, axis=1))
    if KIND == 3:
        mean = _group_mean(wide, mask, mine, count, OVER_TOKEN)
    centred = wide - mean[:, None]
    square = _group_mean(centred * centred, mask, mine, count, OVER_TOKEN)
    scale = 1.0 / tl.sqrt(square + eps)
    shift = member * SIZE if OVER_TOKEN else member * 0
    at = shift[:, None] + column[None, :]
    opposite = shift[:, None] + other[None, :]
    x = tl.where(mask, _normed(x, mean, scale, weight, bias, at, mask, KIND, BIAS), x)
    y = tl.where(mask, _normed(y, mean, scale, weight, bias, opposite, mask, KIND, BIAS), y)
    return x, y


@triton.jit
def as_cached(values, scale, kind: tl.constexpr, MAX: tl.constexpr):
    """Elements as the cache has them: of 8 bits divided by the scale, at most MAX; a NaN stays."""
    if MAX > 0:
        divided = tl.div_rn(values.to(tl.float32), tl.full(values.shape, scale, tl.float32))
        divided = tl.where(divided > MAX, MAX, tl.where(divided < -MAX, -MAX, divided))
        return divided.to(kind)
    return values.to(kind)


@triton.jit(do_not_specialize=["tokens"])
def heads_kernel(
    heads,
    cos,
    sin,
    keys,
    values,
    places,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    out,
    tokens,
    eps,
    key_scale,
    value_scale,
    STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    OVER_TOKEN: tl.constexpr,
    MAX: tl.constexpr,
):
    packed = tl.arange(0, TOKENS * BLOCK_H)
    token = tl.program_id(0).to(tl.int64) * TOKENS + packed // BLOCK_H
    head = packed % BLOCK_H
    known = token < tokens
    column = tl.arange(0, BLOCK_D)
    is_query = head < QUERIES
    is_key = (head >= QUERIES) & (head < QUERIES + KV_HEADS)
    is_value = (head >= QUERIES + KV_HEADS) & (head < QUERIES + 2 * KV_HEADS)
    inside = (known & (head < QUERIES + 2 * KV_HEADS))[:, None] & (column < SIZE)[None, :]
    turned = column < ROTATED
    # The other element of a pair; elements that are not rotated are multiplied by no sine.
    half = ROTATED // 2
    other = tl.where(column < half, column + half, column - half)
    base = heads + (token * STRIDE + head * SIZE)[:, None]
    x = tl.load(base + column[None, :], mask=inside, other=0.0)
    y = tl.load(base + other[None, :], mask=inside, other=0.0)
    if KIND > 0:
        x, y = _normalised(
            x, y, q_weight, q_bias, inside, is_query, head, column, other, eps, SIZE, QUERIES,
            KIND, BIAS, OVER_TOKEN,
        )  # fmt: skip
        x, y = _normalised(
            x, y, k_weight, k_bias, inside, is_key, head - QUERIES, column, other, eps, SIZE,
            KV_HEADS, KIND, BIAS, OVER_TOKEN,
        )  # fmt: skip
    angle = token[:, None] * ROTATED + column[None, :]
    rotates = known[:, None] & turned[None, :]
    c = tl.load(cos + angle, mask=rotates, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=rotates, other=0.0).to(tl.float32)
    rotated = (x.to(tl.float32) * c + y.to(tl.float32) * s).to(x.dtype)
    query_place = (token * QUERIES + head)[:, None] * SIZE + column[None, :]
    tl.store(out + query_place, rotated, mask=inside & is_query[:, None])
    slot = tl.load(places + token, mask=known, other=0)
    key_head = (slot // SLOTS * KV_HEADS + head - QUERIES) * SLOTS + slot % SLOTS
    key_place = key_head[:, None] * SIZE + column[None, :]
    stored = as_cached(rotated, key_scale, keys.dtype.element_ty, MAX)
    tl.store(keys + key_place, stored, mask=inside & is_key[:, None])
    value_place = key_place - KV_HEADS * SLOTS * SIZE
    stored = as_cached(x, value_scale, values.dtype.element_ty, MAX)
    tl.store(values + value_place, stored, mask=inside & is_value[:, None])


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
    """As `antiphon.kernels.rotary.qk_norm_rope_store`, for pages of rows."""
    tokens, every, size = heads.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    queries = every - 2 * kv_heads
    if heads.stride()[1:] != (size, 1):
        heads = heads.contiguous()
    out = torch.empty((tokens, queries, size), dtype=heads.dtype, device=heads.device)
    q_weight, q_bias = (cos, None) if norms is None else norms.query
    k_weight, k_bias = (cos, None) if norms is None else norms.key
    block = power_of_2(every) * power_of_2(size)
    over_token = norms is not None and norms.over == "token"
    each = 1 if over_token else max(1, min(16, TILE // block))
    launch(
        heads_kernel,
        (ceil_div(tokens, each),),
        heads,
        cos.contiguous(),
        sin.contiguous(),
        keys,
        values,
        places,
        q_weight,
        q_weight if q_bias is None else q_bias,
        k_weight,
        k_weight if k_bias is None else k_bias,
        out,
        tokens,
        0.0 if norms is None else norms.eps,
        float(scales.key),
        float(scales.value),
        warps=8 if block * each > TILE // 2 else 4,
        STRIDE=heads.stride(0),
        QUERIES=queries,
        KV_HEADS=kv_heads,
        SIZE=size,
        ROTATED=cos.shape[-1],
        SLOTS=slots,
        TOKENS=each,
        BLOCK_H=power_of_2(every),
        BLOCK_D=power_of_2(size),
        KIND=0 if norms is None else _KINDS[norms.kind],
        BIAS=q_bias is not None,
        OVER_TOKEN=over_token,
        MAX=FP8_MAX.get(keys.dtype, 0.0),
    )
    return out
