"""Linears in tiles that follow from the weights alone: batches do not change a token's bits.

Libraries choose tiles, and parts of the sums, by the number of tokens. Here a tile always has as
many tokens, however few there are, and its sums run from the first input to the last.

Source: He et al. 2025, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab.

Axes: T tokens, I inputs, O outputs.
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
WIDE = 8192
"""Outputs from which on there are enough tiles with more of them."""
DEPTH_BYTES = 128


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
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, INPUTS, BLOCK_K):
        depth = begin + tl.arange(0, BLOCK_K)
        known = (depth < INPUTS)[None, :]
        inputs = tl.load(source + depth[None, :], mask=asked[:, None] & known, other=0.0)
        part = tl.load(place + depth[None, :], mask=used[:, None] & known, other=0.0)
        total = tl.dot(inputs, tl.trans(part), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=used, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=asked[:, None] & used[None, :])


def linear_tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `antiphon.kernels.linear_tiled.linear_tiled`."""
    x = x.contiguous()
    outputs, inputs = weight.shape
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    block_n = 64 if outputs >= WIDE else 32
    launch(
        linear_kernel,
        (ceil_div(len(x), TOKENS), ceil_div(outputs, block_n)),
        x,
        weight,
        weight if bias is None else bias,
        out,
        len(x),
        # With fewer, registers of the larger tile are kept in memory on sm_120.
        warps=4 if block_n == 32 else 8,
        stages=4,
        INPUTS=inputs,
        OUTPUTS=outputs,
        BIAS=bias is not None,
        BLOCK_M=TOKENS,
        BLOCK_N=block_n,
        BLOCK_K=DEPTH_BYTES // x.element_size(),
    )
    return out
