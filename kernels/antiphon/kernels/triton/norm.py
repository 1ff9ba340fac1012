"""Normalisation of rows: one program has some rows, each in registers."""

# pyright: basic

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2

TILE = 4096
"""Elements of a program, if a row has fewer."""


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    rows,
    eps,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    source = row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    values = tl.load(x + source, mask=inside, other=0.0)
    if ADD:
        values = values + tl.load(residual + place, mask=inside, other=0.0)
        tl.store(total + place, values, mask=inside)
    wide = values.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1) / SIZE
    scaled = wide * (1.0 / tl.sqrt(mean_square + eps))[:, None]
    factor = tl.load(weight + column, mask=column < SIZE, other=0.0)[None, :]
    if WIDE:  # noqa: SIM108 (the dtypes of the branches may differ on the way)
        normed = (scaled * factor).to(values.dtype)
    else:
        normed = scaled.to(values.dtype) * factor
    tl.store(out + place, normed, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def layernorm_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    eps,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    source = row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    values = tl.load(x + source, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    mean = tl.sum(wide, axis=1) / SIZE
    centred = tl.where(inside, wide - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / SIZE
    normed = centred * (1.0 / tl.sqrt(variance + eps))[:, None]
    if WEIGHT:
        factor = tl.load(weight + column, mask=column < SIZE, other=0.0)
        normed = normed * factor.to(tl.float32)[None, :]
    if BIAS:
        added = tl.load(bias + column, mask=column < SIZE, other=0.0)
        normed = normed + added.to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(out + place, normed.to(values.dtype), mask=inside)


@triton.jit
def finite_kernel(values, out, size: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        place = start + column
        value = tl.load(values + row.to(tl.int64) * size + place, mask=place < size, other=0.0)
        # No comparison with a NaN holds.
        finite = tl.abs(value.to(tl.float32)) <= 3.4028234663852886e38
        broken += tl.where(finite, 0, 1)
    tl.store(out + row, tl.max(broken, axis=0) == 0)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `antiphon.kernels.norm.rmsnorm`."""
    out, _ = _launch(x, None, weight, eps, wide=False)
    return out


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `antiphon.kernels.norm.add_rmsnorm`."""
    return _launch(x, residual, weight, eps, wide=False)


def rmsnorm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `antiphon.kernels.norm.rmsnorm_wide`."""
    out, _ = _launch(x, None, weight, eps, wide=True)
    return out


def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `antiphon.kernels.norm.layernorm`."""
    rows, size = _rows(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, each = _tile(size)
    launch(
        layernorm_kernel,
        (ceil_div(len(rows), each),),
        rows,
        rows if weight is None else weight,
        rows if bias is None else bias,
        out,
        len(rows),
        eps,
        warps=8 if block > TILE else 4,
        STRIDE=rows.stride(0),
        SIZE=size,
        BLOCK=block,
        ROWS=each,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
    )
    return out


def finite_rows(values: Tensor) -> Tensor:
    """As `antiphon.kernels.norm.finite_rows`, without the wait for a host that would need a sum."""
    values = values.contiguous()
    out = torch.empty(len(values), dtype=torch.bool, device=values.device)
    size = values.shape[1]
    launch(finite_kernel, (len(values),), values, out, size=size, BLOCK=min(1024, power_of_2(size)))
    return out


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, wide: bool
) -> tuple[Tensor, Tensor]:
    rows, size = _rows(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if residual is not None else out
    block, each = _tile(size)
    launch(
        rmsnorm_kernel,
        (ceil_div(len(rows), each),),
        rows,
        rows if residual is None else residual.contiguous(),
        weight,
        out,
        total,
        len(rows),
        eps,
        warps=8 if block > TILE else 4,
        STRIDE=rows.stride(0),
        SIZE=size,
        BLOCK=block,
        ROWS=each,
        ADD=residual is not None,
        WIDE=wide,
    )
    return out, total


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(size: int) -> tuple[int, int]:
    """Columns of a program, of which one row may use fewer, and its rows."""
    block = power_of_2(size)
    return block, max(1, min(16, TILE // block))
