"""Experts: pairs of a token and an expert are sorted by expert, and each expert multiplies its own.

A program has a tile of pairs of one expert and some of its outputs. How many tiles each expert has
only the device knows, so there are as many programs as there might be, and each finds its tile; the
host waits for nothing. Sums run in one order: there are no atomic additions.

Weights in e4m3 have a scale for each output and group of inputs, and activations are rounded to it
before each product: see `antiphon.kernels.triton.rounding`.

Axes: T tokens, K experts of a token, N = T * K pairs, E experts, D hidden size, W width, G groups
of inputs.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.activation import CLAMPED_SWISH, KINDS, gated
from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2
from antiphon.kernels.triton.rounding import quantize

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.experts import ExpertWeights, MatrixScales

PASS = 1024
"""Pairs, or elements of a row, that a program reads at a time."""
FEW, MANY = 16, 64
"""Pairs of a tile: the fewest that fill the matrix units, and those of a long prefill."""
OUTPUTS = 64
DEPTH_BYTES = 128


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(chosen, order, starts, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The pairs of an expert in the order of tokens, behind those of the experts before it."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = tl.load(chosen + place, mask=place < pairs, other=EXPERTS)
        before += (number < expert).to(tl.int32)
    next_place = tl.sum(before, axis=0)
    tl.store(starts + expert, next_place)
    for start in range(0, pairs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = tl.load(chosen + place, mask=place < pairs, other=EXPERTS)
        mine = (number == expert).to(tl.int32)
        tl.store(order + next_place + tl.cumsum(mine, axis=0) - 1, place, mask=mine == 1)
        next_place += tl.sum(mine, axis=0)


@triton.jit
def _tile_of(
    starts, tile, pairs, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The expert of a tile, and its sorted pairs: the first, and the one behind the expert's last.

    Tiles beyond the last have the expert behind the last.
    """
    number = tl.arange(0, BLOCK_E)
    start = tl.load(starts + number, mask=number < EXPERTS, other=pairs)
    end = tl.load(starts + number + 1, mask=number + 1 < EXPERTS, other=pairs)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(number < expert, tiles, 0), axis=0)
    first = tl.sum(tl.where(number == expert, start, 0), axis=0) + (tile - before) * BLOCK_M
    return expert, first, tl.sum(tl.where(number == expert, end, 0), axis=0)


@triton.jit
def _added(
    total, inputs, part, factors, scales, asked, used, BY_GROUP: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The sums with the products of some inputs, whose scales are those of a group, or none."""
    if BY_GROUP:
        factor = tl.load(factors, mask=asked, other=0.0)
        scale = tl.load(scales, mask=used, other=0.0)
        return total + tl.dot(inputs, tl.trans(part)) * (factor[:, None] * scale[None, :])
    # Matrix units of sm_90 add 14 bits of e4m3: no more than a step's sums stay there.
    return tl.dot(
        inputs, tl.trans(part), total, input_precision="ieee", max_num_imprecise_acc=BLOCK_K
    )


@triton.jit
def _scaled(total, factors, scales, asked, used):
    """Sums of all inputs, which share one scale of a row and one of an output."""
    factor = tl.load(factors, mask=asked, other=0.0)
    scale = tl.load(scales, mask=used, other=0.0)
    return total * (factor[:, None] * scale[None, :])


@triton.jit(do_not_specialize=["tokens", "pairs"])
def gate_up_kernel(
    x,
    x_scales,
    shares,
    weights,
    scales,
    biases,
    order,
    starts,
    out,
    tokens,
    pairs,
    sharpness,
    limit,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Activated outputs (N, W) of the gate and up projections, in the order of sorted pairs."""
    expert, first, stop = _tile_of(starts, tl.program_id(0), pairs, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        row = first + tl.arange(0, BLOCK_M)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        asked, used = row < stop, column < WIDTH
        pair = tl.load(order + row, mask=asked, other=0)
        token = (pair // TOP_K).to(tl.int64)
        share = tl.load(shares + pair, mask=asked, other=0.0)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        base = weights + expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
        factors = x_scales + token
        own = scales + expert.to(tl.int64) * (GROUPS * 2 * WIDTH) + column
        by_group: tl.constexpr = GROUP > 0 and GROUP < HIDDEN
        for begin in range(0, HIDDEN, BLOCK_K):
            depth = begin + tl.arange(0, BLOCK_K)
            known = depth < HIDDEN
            source = x + token[:, None] * HIDDEN + depth[None, :]
            inputs = tl.load(source, mask=asked[:, None] & known[None, :], other=0.0)
            if SHARED:
                inputs = (inputs.to(tl.float32) * share[:, None]).to(inputs.dtype)
            place = base + column[:, None] * HIDDEN + depth[None, :]
            there = used[:, None] & known[None, :]
            group = begin // GROUP if by_group else 0
            factor, scale = factors + group * tokens, own + group * (2 * WIDTH)
            first_half = tl.load(place, mask=there, other=0.0)
            gate = _added(gate, inputs, first_half, factor, scale, asked, used, by_group, BLOCK_K)
            second_half = tl.load(place + WIDTH * HIDDEN, mask=there, other=0.0)
            scale += WIDTH
            up = _added(up, inputs, second_half, factor, scale, asked, used, by_group, BLOCK_K)
        if GROUP >= HIDDEN:
            gate = _scaled(gate, factors, own, asked, used)
            up = _scaled(up, factors, own + WIDTH, asked, used)
        if BIAS:
            bias = biases + expert * (2 * WIDTH) + column
            gate += tl.load(bias, mask=used, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + WIDTH, mask=used, other=0.0).to(tl.float32)[None, :]
        kind: tl.constexpr = out.dtype.element_ty
        made = gated(gate.to(kind), up.to(kind), sharpness, limit, KIND)
        inside = asked[:, None] & used[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], made, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def down_kernel(
    x,
    x_scales,
    weights,
    scales,
    biases,
    order,
    starts,
    out,
    pairs,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Outputs (N, D) of the down projections, in the order of pairs."""
    expert, first, stop = _tile_of(starts, tl.program_id(0), pairs, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        row = first + tl.arange(0, BLOCK_M)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        asked, used = row < stop, column < HIDDEN
        pair = tl.load(order + row, mask=asked, other=0)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        base = weights + expert.to(tl.int64) * (HIDDEN * WIDTH)
        factors = x_scales + row
        own = scales + expert.to(tl.int64) * (GROUPS * HIDDEN) + column
        by_group: tl.constexpr = GROUP > 0 and GROUP < WIDTH
        for begin in range(0, WIDTH, BLOCK_K):
            depth = begin + tl.arange(0, BLOCK_K)
            known = depth < WIDTH
            source = x + row.to(tl.int64)[:, None] * WIDTH + depth[None, :]
            inputs = tl.load(source, mask=asked[:, None] & known[None, :], other=0.0)
            place = base + column[:, None] * WIDTH + depth[None, :]
            part = tl.load(place, mask=used[:, None] & known[None, :], other=0.0)
            group = begin // GROUP if by_group else 0
            factor, scale = factors + group * pairs, own + group * HIDDEN
            total = _added(total, inputs, part, factor, scale, asked, used, by_group, BLOCK_K)
        if GROUP >= WIDTH:
            total = _scaled(total, factors, own, asked, used)
        if BIAS:
            bias = tl.load(biases + expert * HIDDEN + column, mask=used, other=0.0)
            total += bias.to(tl.float32)[None, :]
        inside = asked[:, None] & used[None, :]
        place = out + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    rows,
    shares,
    out,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of what the experts of a token made, weighted, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        made = tl.load(rows + pair * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        total += made if SHARED else made * tl.load(shares + pair)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: ActivationKind | tuple[float, float],
    *,
    weighted_inputs: bool = False,
) -> Tensor:
    """As `antiphon.kernels.experts.experts`."""
    few = chosen.numel() <= FEW * len(weights.down)
    return _experts(
        x,
        chosen,
        shares,
        weights,
        activation,
        FEW if few else MANY,
        weighted_inputs=weighted_inputs,
    )


def experts_fixed(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: ActivationKind | tuple[float, float],
    *,
    weighted_inputs: bool = False,
) -> Tensor:
    """As `experts`, in tiles of one size: a token's bits do not depend on those beside it."""
    return _experts(x, chosen, shares, weights, activation, FEW, weighted_inputs=weighted_inputs)


def _experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: ActivationKind | tuple[float, float],
    block_m: int,
    *,
    weighted_inputs: bool,
) -> Tensor:
    x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
    count, _, width = weights.down.shape
    (tokens, hidden), pairs, top_k = x.shape, chosen.numel(), chosen.shape[1]
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(count, dtype=torch.int32, device=x.device)
    launch(sort_kernel, (count,), chosen, order, starts, pairs, EXPERTS=count, BLOCK=PASS)
    opened = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    made = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    # Each expert that has pairs may have one tile that is not full.
    tiles = pairs // block_m + min(pairs, count)
    sharpness, limit = activation if isinstance(activation, tuple) else (1.0, 0.0)
    narrow, weighted, rows, rows_each = weights.scales, weighted_inputs, x, top_k
    if narrow is not None and weighted_inputs:
        # Inputs are rounded after they were weighted: those of each pair by themselves.
        rows = (x[:, None] * shares[..., None]).to(x.dtype).view(pairs, hidden)
        weighted, rows_each = False, 1
    inputs = _inputs(rows, narrow and narrow.gate_up)
    launch(
        gate_up_kernel,
        (tiles, ceil_div(width, OUTPUTS)),
        inputs.codes,
        inputs.factors,
        shares,
        weights.gate_up,
        weights.gate_up if narrow is None else narrow.gate_up.scales,
        weights.gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
        order,
        starts,
        opened,
        len(rows),
        pairs,
        float(sharpness),
        float(limit),
        stages=3,
        EXPERTS=count,
        TOP_K=rows_each,
        HIDDEN=hidden,
        WIDTH=width,
        GROUP=inputs.group,
        GROUPS=inputs.groups,
        KIND=CLAMPED_SWISH if isinstance(activation, tuple) else KINDS[activation],
        BIAS=weights.gate_up_bias is not None,
        SHARED=weighted,
        BLOCK_E=power_of_2(count),
        BLOCK_M=block_m,
        BLOCK_N=OUTPUTS,
        BLOCK_K=inputs.depth,
    )
    inputs = _inputs(opened, narrow and narrow.down)
    launch(
        down_kernel,
        (tiles, ceil_div(hidden, OUTPUTS)),
        inputs.codes,
        inputs.factors,
        weights.down,
        weights.down if narrow is None else narrow.down.scales,
        weights.down if weights.down_bias is None else weights.down_bias,
        order,
        starts,
        made,
        pairs,
        stages=3,
        EXPERTS=count,
        HIDDEN=hidden,
        WIDTH=width,
        GROUP=inputs.group,
        GROUPS=inputs.groups,
        BIAS=weights.down_bias is not None,
        BLOCK_E=power_of_2(count),
        BLOCK_M=block_m,
        BLOCK_N=OUTPUTS,
        BLOCK_K=inputs.depth,
    )
    block = min(PASS, power_of_2(hidden))
    launch(
        combine_kernel,
        (tokens, ceil_div(hidden, block)),
        made,
        shares,
        out,
        TOP_K=top_k,
        HIDDEN=hidden,
        SHARED=weighted_inputs,
        BLOCK=block,
    )
    return out


class _Inputs(NamedTuple):
    """What a product reads of rows: these, or their codes."""

    codes: Tensor
    factors: Tensor  # (G, rows) float32, if they are codes
    group: int  # inputs that share a scale; 0: there are none
    groups: int
    depth: int  # inputs of a step, which do not cross groups


def _inputs(rows: Tensor, scales: MatrixScales | None) -> _Inputs:
    depth, inputs = DEPTH_BYTES // rows.element_size(), rows.shape[1]
    if scales is None:
        return _Inputs(rows, rows, 0, 0, depth)
    group = min(scales.group, inputs)
    codes, factors = quantize(rows, group)
    depth = DEPTH_BYTES if group == inputs else min(DEPTH_BYTES, group & -group)
    return _Inputs(codes, factors, group, len(factors), depth)
