"""Tokens that the device has sampled and the host has not read yet."""

# pyright: basic

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import ceil_div, launch

BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def resolve_kernel(tokens, last, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    token = tl.load(tokens + place, mask=inside, other=0)
    sampled = tl.load(last - 1 - token, mask=inside & (token < 0), other=0)
    tl.store(out + place, tl.where(token < 0, sampled, token).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["count", "vocabulary"])
def record_kernel(last, slots, sampled, finite, count, vocabulary, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    slot = tl.load(slots + place, mask=inside, other=-1)
    token = tl.load(sampled + place, mask=inside, other=0)
    there = tl.load(finite + place, mask=inside, other=0) != 0
    there = there & (token >= 0) & (token < vocabulary)
    tl.store(last + slot, tl.where(there, token, 0).to(tl.int32), mask=slot >= 0)


def resolve(tokens: Tensor, last: Tensor) -> Tensor:
    """As `antiphon.kernels.sampling.resolve_futures`."""
    out = torch.empty(len(tokens), dtype=torch.int64, device=tokens.device)
    grid = (ceil_div(len(tokens), BLOCK),)
    launch(resolve_kernel, grid, tokens, last, out, len(tokens), BLOCK=BLOCK)
    return out


def record(last: Tensor, slots: Tensor, sampled: Tensor, finite: Tensor, vocabulary: int) -> None:
    """As `antiphon.kernels.sampling.record_futures`."""
    count = len(slots)
    grid = (ceil_div(count, BLOCK),)
    launch(record_kernel, grid, last, slots, sampled, finite, count, vocabulary, BLOCK=BLOCK)
