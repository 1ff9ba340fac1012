"""Activations that are rounded to e4m3, with a scale for each token and group of inputs.

Axes: T tokens, I inputs, G groups of inputs.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.kv import FP8_MAX
from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2, warps_of

if TYPE_CHECKING:
    from torch import Tensor

E4M3 = torch.float8_e4m3fn
PASS = 2048
"""Inputs that a program rounds at a time."""


@triton.jit(do_not_specialize=["tokens"])
def quantize_kernel(
    x,
    codes,
    scales,
    skipped,
    tokens,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MAX: tl.constexpr,
    SKIPS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round some groups of a token, if it is not skipped."""
    token = tl.program_id(0).to(tl.int64)
    start_token = tl.load(skipped) if SKIPS else 0
    if token >= start_token:
        group = tl.program_id(1) * EACH + tl.arange(0, EACH)
        first = group[:, None] * GROUP
        peak = tl.zeros([EACH], tl.float32)
        for start in range(0, GROUP, BLOCK):
            member = (start + tl.arange(0, BLOCK))[None, :]
            inside = (member < GROUP) & (first + member < INPUTS)
            value = tl.load(x + token * INPUTS + first + member, mask=inside, other=0.0)
            peak = tl.maximum(peak, tl.max(tl.abs(value.to(tl.float32)), axis=1))
        scale = tl.div_rn(peak, tl.full([EACH], MAX, tl.float32))
        scale = tl.where(scale > 0, scale, 1.0)
        tl.store(scales + group * tokens + token, scale, mask=group < GROUPS)
        for start in range(0, GROUP, BLOCK):
            member = (start + tl.arange(0, BLOCK))[None, :]
            inside = (member < GROUP) & (first + member < INPUTS)
            place = token * INPUTS + first + member
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            value = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
            # What a scale of few bits leaves larger becomes the largest number.
            tl.store(codes + place, value.to(codes.dtype.element_ty), mask=inside)


def quantize(x: Tensor, group: int, skipped: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `antiphon.kernels.linear_fp8.quantize`.

    `skipped`, (1,) int32: how many tokens at the beginning are not rounded. None: all are.
    """
    x = x.contiguous()
    tokens, inputs = x.shape
    group = min(group, inputs)
    groups, block = ceil_div(inputs, group), min(PASS, power_of_2(group))
    codes = torch.empty((tokens, inputs), dtype=E4M3, device=x.device)
    scales = torch.empty((groups, tokens), dtype=torch.float32, device=x.device)
    each = min(PASS // block, power_of_2(groups))
    launch(
        quantize_kernel,
        (tokens, ceil_div(groups, each)),
        x,
        codes,
        scales,
        x if skipped is None else skipped,
        tokens,
        warps=warps_of(each * block * x.element_size()),
        INPUTS=inputs,
        GROUP=group,
        GROUPS=groups,
        MAX=FP8_MAX[E4M3],
        SKIPS=skipped is not None,
        EACH=each,
        BLOCK=block,
    )
    return codes, scales
