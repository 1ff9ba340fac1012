"""Copies of pages: a program has a part of one page of one layer.

Axes: L layers, P pages of the pool, N pages that are copied, B bytes of a page in one layer.
"""

# pyright: basic

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import ceil_div, launch

PASS = 8192
"""Bytes of a program."""


@triton.jit(do_not_specialize=["total", "count"])
def gather_kernel(pool, pages, out, total, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    number, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + number)
    copied = tl.load(pool + (layer * total + page) * SIZE + place, mask=place < SIZE, other=0)
    tl.store(out + (layer * count + number) * SIZE + place, copied, mask=place < SIZE)


@triton.jit(do_not_specialize=["total", "count"])
def scatter_kernel(pool, pages, packed, total, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    number, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + number)
    if page >= 0:
        source = packed + (layer * count + number) * SIZE + place
        copied = tl.load(source, mask=place < SIZE, other=0)
        tl.store(pool + (layer * total + page) * SIZE + place, copied, mask=place < SIZE)


def gather(pool: Tensor, pages: Tensor) -> Tensor:
    """As `antiphon.kernels.pages.gather`."""
    layers, total, size = pool.shape
    out = torch.empty((layers, len(pages), size), dtype=pool.dtype, device=pool.device)
    grid = (len(pages), layers, ceil_div(size, PASS))
    launch(gather_kernel, grid, pool, pages, out, total, len(pages), SIZE=size, BLOCK=PASS)
    return out


def scatter(pool: Tensor, pages: Tensor, packed: Tensor) -> None:
    """As `antiphon.kernels.pages.scatter`."""
    layers, total, size = pool.shape
    grid = (len(pages), layers, ceil_div(size, PASS))
    launch(scatter_kernel, grid, pool, pages, packed, total, len(pages), SIZE=size, BLOCK=PASS)
