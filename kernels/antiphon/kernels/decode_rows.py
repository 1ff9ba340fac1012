"""The rows of a decode step, from what is known of each slot.

Axes: R rows, S slots, N pages of a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from antiphon.kernels.kv import page_slots
from antiphon.kernels.op import kernel
from antiphon.kernels.sampling import resolve_futures
from antiphon.kernels.triton.backend import triton


class ResolvedRows(NamedTuple):
    """Rows of one token each, as embedding, rotary, KV store and attention read them."""

    tokens: Tensor  # (R,) int64 ids
    positions: Tensor  # (R,) int32 indices in their sequences
    rotary: Tensor  # (R,) int32 positions, as the rotary embedding counts
    rows: Tensor  # (4, R) int32: see `antiphon.kernels.triton.rows.DeviceRows`
    places: Tensor  # (R,) int64 slots of the pool, where keys and values are written


@kernel("rows.decode", triton("decode_rows:decode_rows"), invariant=True)
def decode_rows(inputs: Tensor, last: Tensor, table: Tensor, page_tokens: int) -> ResolvedRows:
    """Resolve the rows of a decode step for a cache group with this page table.

    inputs (4, R) int32: slots, tokens as `resolve_futures` takes them, tokens that a row attends
    to, and what is added to its position for the rotary embedding; last (S,) int32, likewise; table
    (S, N) int32, pages of each slot
    """
    slots, tokens, lengths, offsets = inputs
    positions = lengths - 1
    page = table[slots.long(), (positions // page_tokens).long()].long()
    count = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    return ResolvedRows(
        resolve_futures.reference(tokens, last),
        positions,
        positions + offsets,
        torch.stack([count, torch.ones_like(count), lengths, slots]),
        page * page_slots(page_tokens) + positions % page_tokens,
    )
