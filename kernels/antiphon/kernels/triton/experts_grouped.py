"""Experts with weights of 4 or 8 bits, which become weights in registers, as in `linear_grouped`.

A tile of outputs is the left side of a product with the inputs of a tile of pairs. Outputs of gate
and up take turns in it: one product has both of a number, and reads its inputs once.

Axes: N pairs, E experts, D hidden size, W width, G groups of inputs.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.activation import CLAMPED_SWISH, KINDS, gated
from antiphon.kernels.triton.expert_tiles import tile_of
from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2
from antiphon.kernels.triton.linear_grouped import constants_of, products, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.linear_grouped import GroupedMatrix
    from antiphon.kernels.triton.expert_tiles import PairTiles

MANY = 32
"""Pairs of a tile of a long prefill: of 64, registers are kept in memory on sm_86 and sm_89."""


@triton.jit(do_not_specialize=["pairs"])
def gate_up_kernel(
    x,
    codes,
    scales,
    minimums,
    biases,
    order,
    starts,
    out,
    pairs,
    sharpness,
    limit,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    E2M1: tl.constexpr,
    MINIMUMS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Activated outputs (N, W) of the gate and up projections, in the order of sorted pairs."""
    expert, first, stop = tile_of(starts, tl.program_id(0), pairs, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        row = first + tl.arange(0, BLOCK_M)
        asked = row < stop
        pair = tl.load(order + row, mask=asked, other=0)
        place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        output, used = place // 2 + place % 2 * WIDTH, place < 2 * WIDTH
        which = expert.to(tl.int64)
        own = which * ((HIDDEN + GROUP - 1) // GROUP * 2 * WIDTH)
        beside = own
        if scales.dtype.element_ty == tl.uint8:
            beside = which * (2 * WIDTH)
        total = products(
            x + (pair // TOP_K).to(tl.int64)[:, None] * HIDDEN,
            codes + which * (2 * WIDTH * HIDDEN * BITS // 8),
            scales + own,
            minimums + beside,
            output, asked, used, HIDDEN, 2 * WIDTH, GROUP, BITS, FIRST, E2M1, MINIMUMS,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if BIAS:
            bias = tl.load(biases + which * (2 * WIDTH) + output, mask=used, other=0.0)
            total += bias.to(tl.float32)[:, None]
        gate, up = tl.split(tl.reshape(tl.trans(total), [BLOCK_M, BLOCK_N // 2, 2]))
        kind: tl.constexpr = out.dtype.element_ty
        made = gated(gate.to(kind), up.to(kind), sharpness, limit, KIND)
        column = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = asked[:, None] & (column < WIDTH)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], made, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def down_kernel(
    x,
    codes,
    scales,
    minimums,
    biases,
    order,
    starts,
    out,
    pairs,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    E2M1: tl.constexpr,
    MINIMUMS: tl.constexpr,
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
        which = expert.to(tl.int64)
        own = which * ((WIDTH + GROUP - 1) // GROUP * HIDDEN)
        beside = own
        if scales.dtype.element_ty == tl.uint8:
            beside = which * HIDDEN
        total = products(
            x + row.to(tl.int64)[:, None] * WIDTH,
            codes + which * (HIDDEN * WIDTH * BITS // 8),
            scales + own,
            minimums + beside,
            column, asked, used, WIDTH, HIDDEN, GROUP, BITS, FIRST, E2M1, MINIMUMS,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if BIAS:
            bias = tl.load(biases + which * HIDDEN + column, mask=used, other=0.0)
            total += bias.to(tl.float32)[:, None]
        place = out + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        made = tl.trans(total).to(out.dtype.element_ty)
        tl.store(place, made, mask=asked[:, None] & used[None, :])


def gate_up(
    rows: Tensor,
    each: int,
    matrix: GroupedMatrix,
    tiles: PairTiles,
    activation: ActivationKind | tuple[float, float],
) -> Tensor:
    """Activated outputs (N, W) of the gate and up projections, in the order of sorted pairs.

    A row is the input of `each` pairs.
    """
    pairs, (count, outputs, _) = len(tiles.order), matrix.codes.shape
    out = torch.empty((pairs, outputs // 2), dtype=rows.dtype, device=rows.device)
    sharpness, limit = activation if isinstance(activation, tuple) else (1.0, 0.0)
    constants = constants_of(matrix, tiles.size)
    launch(
        gate_up_kernel,
        (tiles.count, ceil_div(outputs, constants["BLOCK_N"])),
        rows,
        *tensors_of(matrix),
        tiles.order,
        tiles.starts,
        out,
        pairs,
        float(sharpness),
        float(limit),
        EXPERTS=count,
        TOP_K=each,
        HIDDEN=matrix.inputs,
        WIDTH=outputs // 2,
        KIND=CLAMPED_SWISH if isinstance(activation, tuple) else KINDS[activation],
        BLOCK_E=power_of_2(count),
        **constants,
    )
    return out


def down(opened: Tensor, matrix: GroupedMatrix, tiles: PairTiles) -> Tensor:
    """Outputs (N, D) of the down projections, in the order of pairs."""
    pairs, (count, hidden, _) = len(opened), matrix.codes.shape
    out = torch.empty((pairs, hidden), dtype=opened.dtype, device=opened.device)
    constants = constants_of(matrix, tiles.size)
    launch(
        down_kernel,
        (tiles.count, ceil_div(hidden, constants["BLOCK_N"])),
        opened,
        *tensors_of(matrix),
        tiles.order,
        tiles.starts,
        out,
        pairs,
        EXPERTS=count,
        HIDDEN=hidden,
        WIDTH=matrix.inputs,
        BLOCK_E=power_of_2(count),
        **constants,
    )
    return out
