"""Linears of e4m3 weights, whose activations are rounded by a kernel before.

A tile of outputs reads its weights once for up to 128 tokens; sums run in one order.

Axes: T tokens, I inputs, O outputs, G groups of inputs.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2
from antiphon.kernels.triton.rounding import quantize

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.linear_fp8 import Fp8Matrix

FEW, MANY = 16, 128
"""Tokens of a tile: the fewest that fill the matrix units, and the most."""
DEPTH = 128


@triton.jit(do_not_specialize=["tokens"])
def multiply_kernel(
    x,
    x_scales,
    weights,
    scales,
    bias,
    out,
    tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
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
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, INPUTS, BLOCK_K):
        depth = begin + tl.arange(0, BLOCK_K)
        known = (depth < INPUTS)[None, :]
        inputs = tl.load(source + depth[None, :], mask=asked[:, None] & known, other=0.0)
        part = tl.load(place + depth[None, :], mask=used[:, None] & known, other=0.0)
        if GROUP < INPUTS:
            made = tl.dot(inputs, tl.trans(part))
            group = begin // GROUP
            factor = tl.load(x_scales + group * tokens + row, mask=asked, other=0.0)
            scale = tl.load(scales + group * OUTPUTS + column, mask=used, other=0.0)
            total += made * (factor[:, None] * scale[None, :])
        else:
            # Matrix units of sm_90 add 14 bits: no more than a step's sums stay there.
            total = tl.dot(inputs, tl.trans(part), total, max_num_imprecise_acc=BLOCK_K)
    if GROUP >= INPUTS:
        factor = tl.load(x_scales + row, mask=asked, other=0.0)
        scale = tl.load(scales + column, mask=used, other=0.0)
        total = total * (factor[:, None] * scale[None, :])
    if BIAS:
        total += tl.load(bias + column, mask=used, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=asked[:, None] & used[None, :])


def linear_fp8(x: Tensor, weights: Fp8Matrix) -> Tensor:
    """As `antiphon.kernels.linear_fp8.linear_fp8`."""
    outputs, inputs = weights.codes.shape
    codes, factors = quantize(x, weights.group)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    block_m = min(MANY, max(FEW, power_of_2(max(1, len(x)))))
    # Few tokens wait for weights, which more programs read then.
    block_n = min(128, max(32, block_m))
    group = min(weights.group, inputs)
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
        GROUP=group,
        BIAS=weights.bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=DEPTH if group == inputs else min(DEPTH, group & -group),
    )
    return out
