"""The rows of a decode step, each by its slot."""

# pyright: basic

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.decode_rows import ResolvedRows
from antiphon.kernels.kv import page_slots
from antiphon.kernels.triton.launch import ceil_div, launch

BLOCK = 128


@triton.jit(do_not_specialize=["count", "width"])
def decode_rows_kernel(
    inputs,
    last,
    table,
    tokens,
    positions,
    rotary,
    rows,
    places,
    count,
    width,
    PAGE_TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(inputs + row, mask=inside, other=0)
    token = tl.load(inputs + count + row, mask=inside, other=0)
    length = tl.load(inputs + 2 * count + row, mask=inside, other=1)
    offset = tl.load(inputs + 3 * count + row, mask=inside, other=0)
    sampled = tl.load(last - 1 - token, mask=inside & (token < 0), other=0)
    position = length - 1
    tl.store(tokens + row, tl.where(token < 0, sampled, token).to(tl.int64), mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(rotary + row, position + offset, mask=inside)
    tl.store(rows + row, row, mask=inside)
    tl.store(rows + count + row, row * 0 + 1, mask=inside)
    tl.store(rows + 2 * count + row, length, mask=inside)
    tl.store(rows + 3 * count + row, slot, mask=inside)
    entry = slot.to(tl.int64) * width + position // PAGE_TOKENS
    page = tl.load(table + entry, mask=inside, other=0).to(tl.int64)
    tl.store(places + row, page * SLOTS + position % PAGE_TOKENS, mask=inside)


def decode_rows(inputs: Tensor, last: Tensor, table: Tensor, page_tokens: int) -> ResolvedRows:
    """As `antiphon.kernels.decode_rows.decode_rows`."""
    count = inputs.shape[1]
    narrow = {"dtype": torch.int32, "device": inputs.device}
    wide = {"dtype": torch.int64, "device": inputs.device}
    tokens, places = (torch.empty(count, **wide) for _ in range(2))
    positions, rotary = (torch.empty(count, **narrow) for _ in range(2))
    rows = torch.empty((4, count), **narrow)
    launch(
        decode_rows_kernel,
        (ceil_div(count, BLOCK),),
        inputs,
        last,
        table,
        tokens,
        positions,
        rotary,
        rows,
        places,
        count,
        table.shape[1],
        PAGE_TOKENS=page_tokens,
        SLOTS=page_slots(page_tokens),
        BLOCK=BLOCK,
    )
    return ResolvedRows(tokens, positions, rotary, rows, places)
