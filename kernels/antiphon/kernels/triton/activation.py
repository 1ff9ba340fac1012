"""Activations, gated and plain, over all elements."""

# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.launch import ceil_div, launch

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind

BLOCK = 1024
KINDS: dict[ActivationKind, int] = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu_squared": 4,
    "tanh": 5,
    "quick_gelu": 7,
}
CLAMPED_SWISH = 6


@triton.jit
def tanh(x):
    """The hyperbolic tangent, which is no operation of Triton."""
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An activation of `KINDS`, float32."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    if KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 2:
        # Half of one plus a hyperbolic tangent is a sigmoid.
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if KIND == 5:
        return tanh(x)
    if KIND == 7:
        return x / (1.0 + tl.exp(-1.702 * x))
    positive = tl.where(x < 0.0, 0.0, x)  # a NaN stays
    if KIND == 4:
        return positive * positive
    return positive


@triton.jit
def gated(gate, up, sharpness, limit, KIND: tl.constexpr):
    """The gate's activation, rounded, times the rest; clamped swish in float32 throughout."""
    if KIND == 6:
        wide, rest = gate.to(tl.float32), up.to(tl.float32)
        wide = tl.where(wide > limit, limit, wide)
        rest = tl.where(rest > limit, limit, tl.where(rest < -limit, -limit, rest))
        return (wide / (1.0 + tl.exp(-sharpness * wide)) * (rest + 1.0)).to(up.dtype)
    return activated(gate.to(tl.float32), KIND).to(up.dtype) * up


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    gate_up,
    out,
    rows,
    sharpness,
    limit,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Over all elements, not by row: a width need not be a multiple of the block. The compiler
    # loads 128 bits at once as it knows that their number is a multiple of the width.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows.to(tl.int64) * WIDTH
    first = place // WIDTH * (2 * WIDTH) + place % WIDTH
    gate = tl.load(gate_up + first, mask=inside, other=0.0)
    up = tl.load(gate_up + first + WIDTH, mask=inside, other=0.0)
    tl.store(out + place, gated(gate, up, sharpness, limit, KIND), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def plain_kernel(
    x, out, rows, softcap, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows.to(tl.int64) * WIDTH
    value = tl.load(x + place, mask=inside, other=0.0)
    made = softcap * activated(value.to(tl.float32) / softcap, KIND)
    tl.store(out + place, made.to(value.dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sigmoid_mul_kernel(
    x,
    gate,
    out,
    rows,
    X_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows.to(tl.int64) * WIDTH
    token, column = place // WIDTH, place % WIDTH
    value = tl.load(x + token * X_STRIDE + column, mask=inside, other=0.0)
    wide = tl.load(gate + token * GATE_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value * (1.0 / (1.0 + tl.exp(-wide))).to(value.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `antiphon.kernels.activation.silu_mul`."""
    return _gated(gate_up, KINDS["silu"])


def gate(gate_up: Tensor, activation: ActivationKind) -> Tensor:
    """As `antiphon.kernels.activation.gate`."""
    return _gated(gate_up, KINDS[activation])


def clamped_swish_mul(gate_up: Tensor, sharpness: float, limit: float) -> Tensor:
    """As `antiphon.kernels.activation.clamped_swish_mul`."""
    return _gated(gate_up, CLAMPED_SWISH, sharpness, limit)


def activate(x: Tensor, activation: ActivationKind) -> Tensor:
    """As `antiphon.kernels.activation.activate`."""
    return _plain(x, KINDS[activation], 1.0)


def soft_capped(x: Tensor, softcap: float) -> Tensor:
    """As `antiphon.kernels.activation.soft_capped`."""
    return _plain(x, KINDS["tanh"], softcap)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """As `antiphon.kernels.activation.sigmoid_mul`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[1] * x.shape[2]
    launch(
        sigmoid_mul_kernel,
        (ceil_div(out.numel(), BLOCK),),
        x,
        gate,
        out,
        len(x),
        X_STRIDE=x.stride(0),
        GATE_STRIDE=gate.stride(0),
        WIDTH=width,
        BLOCK=BLOCK,
    )
    return out


def _gated(gate_up: Tensor, kind: int, sharpness: float = 1.0, limit: float = 0.0) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    launch(
        gated_kernel,
        (ceil_div(out.numel(), BLOCK),),
        gate_up,
        out,
        out.numel() // width,
        float(sharpness),
        float(limit),
        WIDTH=width,
        KIND=kind,
        BLOCK=BLOCK,
    )
    return out


def _plain(x: Tensor, kind: int, softcap: float) -> Tensor:
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    launch(
        plain_kernel,
        (ceil_div(x.numel(), BLOCK),),
        x,
        out,
        x.numel() // width,
        float(softcap),
        WIDTH=width,
        KIND=kind,
        BLOCK=BLOCK,
    )
    return out
