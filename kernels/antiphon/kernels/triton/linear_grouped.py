"""Linears of 4 or 8 bits: codes become weights in registers, as the matrix units take them.

A tile of outputs is the left side of a product, which matrix units may read from registers: it
reads its weights once for up to 64 tokens, of which there may be as few as 16. Sums run in one
order.

Axes: T tokens, I inputs, O outputs, G groups of inputs.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.linear_grouped import GroupedMatrix

FEW, MANY = 16, 64
"""Tokens of a tile: the fewest that fill the matrix units, and the most."""
OUTPUTS = 64
"""Outputs of a tile of few tokens, and of one that has the most twice as many."""
DEPTH = 128
GROUPS = 4
"""Groups of a block at the most: the scales of all its weights are in registers."""


@triton.jit
def numbers(code, FIRST: tl.constexpr, E2M1: tl.constexpr):
    """The value of codes of 4 bits, in float32."""
    code = code.to(tl.int32)
    if E2M1:
        size = code & 7
        # In halves: 0, 1, 2, 3, 4, 6, 8, 12.
        halves = tl.where(size < 2, size, ((size & 1) | 2) << tl.maximum((size >> 1) - 1, 0))
        value = tl.where(code > 7, -0.5, 0.5) * halves.to(tl.float32)
    else:
        value = code.to(tl.float32) + FIRST
    return value


@triton.jit
def scale_of(stored):
    """Scales in float32; the bytes of e4m3 without a sign, which not all GPUs convert."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int32)
        # The bias of an exponent is 7 there and 127 here.
        normal = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        scale = tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def shared(
    numbers,
    begin,
    column,
    used,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNS: tl.constexpr,
    TURN: tl.constexpr,
):
    """The scales, or minimums, of a block of inputs: one of an output, or one for each of WIDTH.

    Of a block with several groups, every one of TURNS from TURN on.
    """
    if GROUP >= BLOCK_K or GROUP >= INPUTS:
        place = numbers + begin // GROUP * OUTPUTS + column
        found = scale_of(tl.load(place, mask=used, other=0))[:, None]
    else:
        each: tl.constexpr = BLOCK_K // GROUP // TURNS
        group = begin // GROUP + TURNS * tl.arange(0, each) + TURN
        known = used[:, None] & (group * GROUP < INPUTS)[None, :]
        place = numbers + group[None, :] * OUTPUTS + column[:, None]
        apart = scale_of(tl.load(place, mask=known, other=0))
        wide = tl.broadcast_to(apart[:, :, None], [BLOCK_N, each, WIDTH // each])
        found = tl.reshape(wide, [BLOCK_N, WIDTH])
    return found


@triton.jit
def products(
    source,
    codes,
    scales,
    minimums,
    column,
    asked,
    used,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    E2M1: tl.constexpr,
    MINIMUMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums (N, M) of some outputs of tokens that begin at `source` (M, 1).

    A block of inputs lies in one group, or is some groups. With scales of 8 bits, `minimums` are
    tensor scales.
    """
    # Groups of 16 inputs are in the low and in the high bits of bytes by turns.
    turns: tl.constexpr = (
        2 if BITS == 4 and GROUP == 16 else 1  # pyright: ignore[reportAssignmentType]
    )
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in range(0, INPUTS, BLOCK_K):
        width: tl.constexpr = BLOCK_K if BITS == 8 else BLOCK_K // 2
        scale = shared(
            scales, begin, column, used,
            INPUTS, OUTPUTS, GROUP, BLOCK_N, BLOCK_K, width, turns, 0,
        )  # fmt: skip
        least = 0.0
        if MINIMUMS:
            least = shared(
                minimums, begin, column, used,
                INPUTS, OUTPUTS, GROUP, BLOCK_N, BLOCK_K, width, turns, 0,
            )  # fmt: skip
        if BITS == 8:
            depth = begin + tl.arange(0, BLOCK_K)
            known = (depth < INPUTS)[None, :]
            place = codes + column.to(tl.int64)[:, None] * INPUTS + depth[None, :]
            code = tl.load(place, mask=used[:, None] & known, other=0)
            inputs = tl.load(source + depth[None, :], mask=asked[:, None] & known, other=0.0)
            weight = (code.to(tl.float32) * scale + least).to(inputs.dtype)
            total = tl.dot(weight, tl.trans(inputs), total, input_precision="ieee")
        else:
            byte = begin // 2 + tl.arange(0, BLOCK_K // 2)
            known = (byte < INPUTS // 2)[None, :]
            place = codes + column.to(tl.int64)[:, None] * (INPUTS // 2) + byte[None, :]
            code = tl.load(place, mask=used[:, None] & known, other=0)
            depth = byte // 16 * 32 + byte % 16
            low = tl.load(source + depth[None, :], mask=asked[:, None] & known, other=0.0)
            high = tl.load(source + depth[None, :] + 16, mask=asked[:, None] & known, other=0.0)
            weight = (numbers(code & 15, FIRST, E2M1) * scale + least).to(low.dtype)
            total = tl.dot(weight, tl.trans(low), total, input_precision="ieee")
            if turns == 2:
                scale = shared(
                    scales, begin, column, used,
                    INPUTS, OUTPUTS, GROUP, BLOCK_N, BLOCK_K, width, turns, 1,
                )  # fmt: skip
                if MINIMUMS:
                    least = shared(
                        minimums, begin, column, used,
                        INPUTS, OUTPUTS, GROUP, BLOCK_N, BLOCK_K, width, turns, 1,
                    )  # fmt: skip
            weight = (numbers(code >> 4, FIRST, E2M1) * scale + least).to(low.dtype)
            total = tl.dot(weight, tl.trans(high), total, input_precision="ieee")
    if scales.dtype.element_ty == tl.uint8:
        total *= tl.load(minimums + column, mask=used, other=0.0)[:, None]
    return total


@triton.jit(do_not_specialize=["tokens"])
def multiply_kernel(
    x,
    codes,
    scales,
    minimums,
    bias,
    out,
    tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    E2M1: tl.constexpr,
    MINIMUMS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some outputs of some tokens."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    asked, used = row < tokens, column < OUTPUTS
    total = products(
        x + row.to(tl.int64)[:, None] * INPUTS,
        codes, scales, minimums, column, asked, used,
        INPUTS, OUTPUTS, GROUP, BITS, FIRST, E2M1, MINIMUMS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    made = tl.trans(total)
    if BIAS:
        made += tl.load(bias + column, mask=used, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(place, made.to(out.dtype.element_ty), mask=asked[:, None] & used[None, :])


def linear_grouped(x: Tensor, weights: GroupedMatrix) -> Tensor:
    """As `antiphon.kernels.linear_grouped.linear_grouped`."""
    return _multiply(x, weights, min(MANY, max(FEW, power_of_2(max(1, len(x))))))


def linear_grouped_fixed(x: Tensor, weights: GroupedMatrix) -> Tensor:
    """As `linear_grouped`, in tiles of one size: the bits of a token follow from it alone."""
    return _multiply(x, weights, MANY)


def tensors_of(matrix: GroupedMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, minimums or tensor scales, and bias; scales in place of what there is not."""
    scales, beside, bias = matrix.scales, matrix.minimums, matrix.bias
    if matrix.tensor_scales is not None:
        scales, beside = scales.view(torch.uint8), matrix.tensor_scales
    return (
        matrix.codes,
        scales,
        scales if beside is None else beside,
        scales if bias is None else bias,
    )


def constants_of(matrix: GroupedMatrix, block_m: int) -> dict[str, Any]:
    """What kernels know of weights when they are compiled, and of tiles of so many tokens."""
    inputs = matrix.inputs
    group = min(matrix.group, inputs)
    bits = 8 if matrix.codes.dtype is torch.int8 else 4
    # A block is whole groups, or a part of one.
    depth = min(DEPTH, GROUPS * group)
    if bits == 4 and group == 16 and block_m == FEW:
        # Half as deep, there were too few inputs to load 128 bits at once; low and high bits of
        # bytes have scales of their own. Of more tokens, registers are kept in memory on sm_100.
        depth = DEPTH
    whole = group == inputs or group % depth == 0 or depth % group == 0
    return {
        "warps": 4 if block_m < MANY else 8,
        "stages": 4 if block_m == FEW else 3,
        "GROUP": group,
        "BITS": bits,
        "FIRST": matrix.first or 0,
        "E2M1": matrix.first is None,
        "MINIMUMS": matrix.minimums is not None,
        "BIAS": matrix.bias is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": OUTPUTS if block_m < MANY else 2 * OUTPUTS,
        "BLOCK_K": depth if whole else group & -group,
    }


def _multiply(x: Tensor, weights: GroupedMatrix, block_m: int) -> Tensor:
    x = x.contiguous()
    outputs = len(weights.codes)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    constants = constants_of(weights, block_m)
    launch(
        multiply_kernel,
        (ceil_div(len(x), block_m), ceil_div(outputs, constants["BLOCK_N"])),
        x,
        *tensors_of(weights),
        out,
        len(x),
        INPUTS=weights.inputs,
        OUTPUTS=outputs,
        **constants,
    )
    return out
