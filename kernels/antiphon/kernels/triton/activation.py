"""Gated activations."""

# pyright: basic

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import ceil_div, launch

BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def silu_mul_kernel(gate_up, out, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # Over all elements, not by row: a width need not be a multiple of the block.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    first = place // WIDTH * (2 * WIDTH) + place % WIDTH
    gate = tl.load(gate_up + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + first + WIDTH, mask=inside, other=0.0)
    opened = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + place, opened * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `antiphon.kernels.activation.silu_mul`."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    count = out.numel()
    launch(
        silu_mul_kernel, (ceil_div(count, BLOCK),), gate_up, out, count, WIDTH=width, BLOCK=BLOCK
    )
    return out
