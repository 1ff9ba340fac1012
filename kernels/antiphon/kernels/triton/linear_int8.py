"""Linears of int8 weights, whose activations are rounded by a kernel before.

A tile of outputs reads its weights once for up to 128 tokens. Sums are whole numbers, whose bits
depend on no order.

Axes: T tokens, I inputs, O outputs.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.linear_int8 import INT8_MAX
from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.linear_grouped import GroupedMatrix

FEW, MANY = 16, 128
"""Tokens of a tile: the fewest that fill the matrix units, and the most."""
DEPTH = 128
PASS = 2048
"""Inputs that a program rounds at a time."""


@triton.jit
def round_kernel(x, codes, scales, INPUTS: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr):
    """Round a token."""
    token = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([1], tl.float32)
    for start in range(0, INPUTS, BLOCK):
        member = (start + tl.arange(0, BLOCK))[None, :]
        value = tl.load(x + token * INPUTS + member, mask=member < INPUTS, other=0.0)
        value = value.to(tl.float32)
        # What is no number is larger than all that are.
        size = tl.where(value == value, tl.abs(value), float("inf"))
        peak = tl.maximum(peak, tl.max(size, axis=1))
    scale = tl.div_rn(peak, tl.full([1], MAX, tl.float32))
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + token + tl.arange(0, 1), scale)
    for start in range(0, INPUTS, BLOCK):
        member = (start + tl.arange(0, BLOCK))[None, :]
        inside = member < INPUTS
        value = tl.load(x + token * INPUTS + member, mask=inside, other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
        # Beyond 2 ** 23 there are whole numbers only: to the nearest, of two the even one.
        whole = (value + 12582912.0) - 12582912.0
        whole = tl.minimum(tl.maximum(whole, -MAX), MAX)
        tl.store(codes + token * INPUTS + member, whole.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def multiply_kernel(
    x,
    factors,
    weights,
    scales,
    bias,
    out,
    tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some outputs of some tokens."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    asked, used = row < tokens, column < OUTPUTS
    source = x + row.to(tl.int64)[:, None] * INPUTS
    place = weights + column.to(tl.int64)[:, None] * INPUTS
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for begin in range(0, INPUTS, BLOCK_K):
        depth = begin + tl.arange(0, BLOCK_K)
        known = (depth < INPUTS)[None, :]
        inputs = tl.load(source + depth[None, :], mask=asked[:, None] & known, other=0)
        part = tl.load(place + depth[None, :], mask=used[:, None] & known, other=0)
        total = tl.dot(inputs, tl.trans(part), total, out_dtype=tl.int32)
    factor = tl.load(factors + row, mask=asked, other=0.0)
    scale = tl.load(scales + column, mask=used, other=0.0)
    made = total.to(tl.float32) * (factor[:, None] * scale[None, :])
    if BIAS:
        made += tl.load(bias + column, mask=used, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(place, made.to(out.dtype.element_ty), mask=asked[:, None] & used[None, :])


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `antiphon.kernels.linear_int8.quantize`."""
    x = x.contiguous()
    tokens, inputs = x.shape
    codes = torch.empty((tokens, inputs), dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    launch(
        round_kernel,
        (tokens,),
        x,
        codes,
        scales,
        INPUTS=inputs,
        MAX=float(INT8_MAX),
        BLOCK=min(PASS, power_of_2(inputs)),
    )
    return codes, scales


def linear_int8(x: Tensor, weights: GroupedMatrix) -> Tensor:
    """As `antiphon.kernels.linear_int8.linear_int8`."""
    outputs, inputs = weights.codes.shape
    codes, factors = quantize(x)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    block_m = min(MANY, max(FEW, power_of_2(max(1, len(x)))))
    # Few tokens wait for weights, which more programs read then.
    block_n = min(128, max(32, block_m))
    launch(
        multiply_kernel,
        (ceil_div(len(x), block_m), ceil_div(outputs, block_n)),
        codes,
        factors,
        weights.codes,
        weights.scales,
        weights.scales if weights.bias is None else weights.bias,
        out,
        len(x),
        warps=8 if block_m == MANY else 4,
        stages=4 if block_m == FEW else 3,
        INPUTS=inputs,
        OUTPUTS=outputs,
        BIAS=weights.bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=DEPTH,
    )
    return out
