"""Linears in tiles that follow from the weights alone: batches do not change a token's bits.

Libraries choose tiles, and parts of the sums, by the number of tokens. Here a tile always has as
many tokens, however few there are, and its sums run from the first input to the last.

Source: He et al. 2025, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab.

Axes: T tokens, Q heads, I inputs, O outputs.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.launch import ceil_div, launch

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 64
"""Of a tile: the fewest that the matrix units of sm_90 and later take whole."""
NARROW = 32
"""Outputs of a tile, of few and of a head."""
WIDE = 8192
"""Outputs from which on there are enough tiles with twice as many of them."""
DEPTH_BYTES = 128


@triton.jit
def _multiplied(
    source,
    place,
    asked,
    used,
    inputs,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows at `source` (M, 1) times weights of outputs at `place` (N, 1): (M, N), in float32."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, inputs, BLOCK_K):
        depth = begin + tl.arange(0, BLOCK_K)
        known = (depth < INPUTS)[None, :]
        values = tl.load(source + depth[None, :], mask=asked[:, None] & known, other=0.0)
        part = tl.load(place + depth[None, :], mask=used[:, None] & known, other=0.0)
        total = tl.dot(values, tl.trans(part), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x,
    weight,
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
    place = weight + column.to(tl.int64)[:, None] * INPUTS
    total = _multiplied(source, place, asked, used, INPUTS, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K)
    if BIAS:
        total += tl.load(bias + column, mask=used, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=asked[:, None] & used[None, :])


@triton.jit(do_not_specialize=["tokens", "inputs"])
def linear_heads_kernel(
    x,
    weight,
    out,
    tokens,
    inputs,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some outputs of a head of some tokens."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    asked, used = row < tokens, column < OUTPUTS
    source = x + row.to(tl.int64)[:, None] * ROW + head * HEAD
    place = weight + (head * OUTPUTS + column)[:, None] * INPUTS
    # A loop over few inputs would be unrolled if their number were a constant.
    total = _multiplied(source, place, asked, used, inputs, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K)
    place = out + (row.to(tl.int64) * HEADS + head)[:, None] * OUTPUTS + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=asked[:, None] & used[None, :])


def linear_tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `antiphon.kernels.linear_tiled.linear_tiled`."""
    x = x.contiguous()
    outputs, inputs = weight.shape
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    block_n = 2 * NARROW if outputs >= WIDE else NARROW
    launch(
        linear_kernel,
        (ceil_div(len(x), TOKENS), ceil_div(outputs, block_n)),
        x,
        weight,
        weight if bias is None else bias,
        out,
        len(x),
        # With fewer, registers of the larger tile are kept in memory on sm_120.
        warps=4 if block_n == NARROW else 8,
        stages=4,
        INPUTS=inputs,
        OUTPUTS=outputs,
        BIAS=bias is not None,
        BLOCK_M=TOKENS,
        BLOCK_N=block_n,
        BLOCK_K=DEPTH_BYTES // x.element_size(),
    )
    return out


def linear_heads(x: Tensor, weight: Tensor) -> Tensor:
    """As `antiphon.kernels.linear_tiled.linear_heads`."""
    if x.stride(2) != 1:
        x = x.contiguous()
    heads, outputs, inputs = weight.shape
    out = torch.empty((len(x), heads, outputs), dtype=x.dtype, device=x.device)
    launch(
        linear_heads_kernel,
        (ceil_div(len(x), TOKENS), ceil_div(outputs, NARROW), heads),
        x,
        weight,
        out,
        len(x),
        inputs,
        stages=4,
        ROW=x.stride(0),
        HEAD=x.stride(1),
        HEADS=heads,
        INPUTS=inputs,
        OUTPUTS=outputs,
        BLOCK_M=TOKENS,
        BLOCK_N=NARROW,
        BLOCK_K=DEPTH_BYTES // x.element_size(),
    )
    return out
