"""Experts: pairs of a token and an expert are sorted by expert, and each expert multiplies its own.

A program has a tile of pairs of one expert (`antiphon.kernels.triton.expert_tiles`) and some of its
outputs. Sums run in one order: there are no atomic additions.

Weights in e4m3 have a scale for each output and group of inputs, and activations are rounded to it
before each product: see `antiphon.kernels.triton.rounding`. Those of 4 or 8 bits in groups have
kernels of their own (`antiphon.kernels.triton.experts_grouped`).

A rank with a slice of the experts multiplies the pairs of these alone, and reads nothing of others.

Axes: T tokens, K experts of a token, N = T * K pairs, E experts that are here, D hidden size,
W width, G groups of inputs.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from antiphon.kernels.experts import PlainMatrix
from antiphon.kernels.linear_grouped import GroupedMatrix
from antiphon.kernels.triton import experts_grouped
from antiphon.kernels.triton.activation import CLAMPED_SWISH, KINDS, gated
from antiphon.kernels.triton.expert_tiles import PairTiles, sort_pairs, tile_of
from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2
from antiphon.kernels.triton.rounding import quantize

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.experts import ExpertSlice, ExpertWeights
    from antiphon.kernels.linear_fp8 import Fp8Matrix

PASS = 1024
"""Elements of a row that a program reads at a time."""
FEW, MANY = 16, 64
"""Pairs of a tile: the fewest that fill the matrix units, and those of a long prefill."""
OUTPUTS = 64
DEPTH_BYTES = 128


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
    expert, first, stop = tile_of(starts, tl.program_id(0), pairs, EXPERTS, BLOCK_E, BLOCK_M)
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
    expert, first, stop = tile_of(starts, tl.program_id(0), pairs, EXPERTS, BLOCK_E, BLOCK_M)
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


@triton.jit(do_not_specialize=["first"])
def combine_kernel(
    rows,
    chosen,
    shares,
    out,
    first,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SHARED: tl.constexpr,
    SLICED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of what the experts of a token made, weighted, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        place = tl.load(chosen + pair) - first if SLICED else 0
        if (place >= 0) & (place < EXPERTS):
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
    own: ExpertSlice | None = None,
    weighted_inputs: bool = False,
) -> Tensor:
    """As `antiphon.kernels.experts.experts`."""
    # Of the experts that tokens choose among, a slice has its part of the pairs.
    total = weights.experts if own is None else own.total
    many = experts_grouped.MANY if isinstance(weights.gate_up, GroupedMatrix) else MANY
    return _experts(
        x,
        chosen,
        shares,
        weights,
        activation,
        FEW if chosen.numel() <= FEW * total else many,
        own=own,
        weighted_inputs=weighted_inputs,
    )


def experts_fixed(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: ActivationKind | tuple[float, float],
    *,
    own: ExpertSlice | None = None,
    weighted_inputs: bool = False,
) -> Tensor:
    """As `experts`, in tiles of one size: a token's bits do not depend on those beside it."""
    return _experts(
        x, chosen, shares, weights, activation, FEW, own=own, weighted_inputs=weighted_inputs
    )


def _experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: ActivationKind | tuple[float, float],
    size: int,
    *,
    own: ExpertSlice | None,
    weighted_inputs: bool,
) -> Tensor:
    x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
    (tokens, hidden), top_k = x.shape, chosen.shape[1]
    tiles = sort_pairs(chosen, weights.experts, size, own)
    rows, each, weighted = x, top_k, weighted_inputs
    if weighted and not isinstance(weights.gate_up, PlainMatrix):
        # Inputs are rounded after they were weighted: those of each pair by themselves.
        rows = (x[:, None] * shares[..., None]).to(x.dtype).view(-1, hidden)
        each, weighted = 1, False
    if isinstance(weights.gate_up, GroupedMatrix):
        opened = experts_grouped.gate_up(rows, each, weights.gate_up, tiles, activation)
    else:
        opened = _gate_up(rows, each, shares, weights.gate_up, tiles, activation, weighted=weighted)
    if isinstance(weights.down, GroupedMatrix):
        made = experts_grouped.down(opened, weights.down, tiles)
    else:
        made = _down(opened, weights.down, tiles)
    out = torch.empty_like(x)
    block = min(PASS, power_of_2(hidden))
    launch(
        combine_kernel,
        (tokens, ceil_div(hidden, block)),
        made,
        chosen,
        shares,
        out,
        0 if own is None else own.first,
        EXPERTS=weights.experts,
        TOP_K=top_k,
        HIDDEN=hidden,
        SHARED=weighted_inputs,
        SLICED=own is not None,
        BLOCK=block,
    )
    return out


def _gate_up(
    rows: Tensor,
    each: int,
    shares: Tensor,
    matrix: PlainMatrix | Fp8Matrix,
    tiles: PairTiles,
    activation: ActivationKind | tuple[float, float],
    *,
    weighted: bool,
) -> Tensor:
    """Activated outputs (N, W) of the gate and up projections, in the order of sorted pairs.

    A row is the input of `each` pairs; `weighted`: multiplied by the share of each.
    """
    pairs, (count, outputs, hidden) = len(tiles.order), matrix[0].shape
    width, inputs = outputs // 2, _inputs(rows, matrix)
    out = torch.empty((pairs, width), dtype=rows.dtype, device=rows.device)
    sharpness, limit = activation if isinstance(activation, tuple) else (1.0, 0.0)
    # Of DeepSeek-V3's experts in fp8, 64 outputs of both products spill a register on sm_120. Half
    # as many do not, and keep the order of sums and the bytes that a multiprocessor has in flight.
    halved = tiles.size == FEW and not isinstance(matrix, PlainMatrix)
    block = OUTPUTS // 2 if halved else OUTPUTS
    launch(
        gate_up_kernel,
        (tiles.count, ceil_div(width, block)),
        inputs.codes,
        inputs.factors,
        shares,
        matrix[0],
        inputs.scales,
        matrix[0] if matrix.bias is None else matrix.bias,
        tiles.order,
        tiles.starts,
        out,
        len(rows),
        pairs,
        float(sharpness),
        float(limit),
        stages=3,
        EXPERTS=count,
        TOP_K=each,
        HIDDEN=hidden,
        WIDTH=width,
        GROUP=inputs.group,
        GROUPS=inputs.groups,
        KIND=CLAMPED_SWISH if isinstance(activation, tuple) else KINDS[activation],
        BIAS=matrix.bias is not None,
        SHARED=weighted,
        BLOCK_E=power_of_2(count),
        BLOCK_M=tiles.size,
        BLOCK_N=block,
        BLOCK_K=inputs.depth,
    )
    return out


def _down(opened: Tensor, matrix: PlainMatrix | Fp8Matrix, tiles: PairTiles) -> Tensor:
    """Outputs (N, D) of the down projections, in the order of pairs."""
    pairs, (count, hidden, width) = len(opened), matrix[0].shape
    out = torch.empty((pairs, hidden), dtype=opened.dtype, device=opened.device)
    inputs = _inputs(opened, matrix, tiles.skipped)
    launch(
        down_kernel,
        (tiles.count, ceil_div(hidden, OUTPUTS)),
        inputs.codes,
        inputs.factors,
        matrix[0],
        inputs.scales,
        matrix[0] if matrix.bias is None else matrix.bias,
        tiles.order,
        tiles.starts,
        out,
        pairs,
        stages=3,
        EXPERTS=count,
        HIDDEN=hidden,
        WIDTH=width,
        GROUP=inputs.group,
        GROUPS=inputs.groups,
        BIAS=matrix.bias is not None,
        BLOCK_E=power_of_2(count),
        BLOCK_M=tiles.size,
        BLOCK_N=OUTPUTS,
        BLOCK_K=inputs.depth,
    )
    return out


class _Inputs(NamedTuple):
    """What a product reads of rows, these or their codes, and the scales of its weights."""

    codes: Tensor
    factors: Tensor  # (G, rows) float32, if they are codes
    scales: Tensor  # (E, G, outputs) float32, likewise
    group: int  # inputs that share a scale; 0: there are none
    groups: int
    depth: int  # inputs of a step, which do not cross groups


def _inputs(
    rows: Tensor, matrix: PlainMatrix | Fp8Matrix, skipped: Tensor | None = None
) -> _Inputs:
    """Of rows behind so many that are skipped."""
    depth, inputs = DEPTH_BYTES // rows.element_size(), rows.shape[1]
    if isinstance(matrix, PlainMatrix):
        return _Inputs(rows, rows, matrix.weights, 0, 0, depth)
    group = min(matrix.group, inputs)
    codes, factors = quantize(rows, group, skipped)
    depth = DEPTH_BYTES if group == inputs else min(DEPTH_BYTES, group & -group)
    return _Inputs(codes, factors, matrix.scales, group, len(factors), depth)
