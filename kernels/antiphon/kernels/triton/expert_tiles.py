"""Pairs of a token and an expert, sorted by expert, in tiles of one expert each.

How many tiles each expert has only the device knows, so there are as many programs as there might
be, and each finds its tile; the host waits for nothing. Where a rank has a slice of the experts,
pairs of others come first, and are in no tile.

Axes: N pairs, E experts that are here.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.experts import ExpertSlice

PASS = 1024
"""Pairs that a program reads at a time."""


@triton.jit
def _expert_of(chosen, pair, pairs, first, EXPERTS: tl.constexpr, SLICED: tl.constexpr):
    """Places among the experts here; negative: of another rank's. Behind the last pair: EXPERTS."""
    number = tl.load(chosen + pair, mask=pair < pairs, other=EXPERTS)
    if SLICED:
        number = tl.where(number < first + EXPERTS, number - first, -1)
        number = tl.where(pair < pairs, number, EXPERTS)
    return number


@triton.jit(do_not_specialize=["pairs", "first"])
def sort_kernel(
    chosen,
    order,
    starts,
    pairs,
    first,
    EXPERTS: tl.constexpr,
    SLICED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The pairs of an expert in the order of tokens, behind those of the experts before it."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = _expert_of(chosen, place, pairs, first, EXPERTS, SLICED)
        before += (number < expert).to(tl.int32)
    next_place = tl.sum(before, axis=0)
    tl.store(starts + expert, next_place)
    for start in range(0, pairs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = _expert_of(chosen, place, pairs, first, EXPERTS, SLICED)
        mine = (number == expert).to(tl.int32)
        tl.store(order + next_place + tl.cumsum(mine, axis=0) - 1, place, mask=mine == 1)
        next_place += tl.sum(mine, axis=0)


@triton.jit
def tile_of(
    starts, tile, pairs, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The expert of a tile, and its sorted pairs: the first, and the one behind the expert's last.

    Tiles beyond the last have the expert behind the last.
    """
    number = tl.arange(0, BLOCK_E)
    start = tl.load(starts + number, mask=number < EXPERTS, other=pairs)
    end = tl.load(starts + number + 1, mask=number + 1 < EXPERTS, other=pairs)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(number < expert, tiles, 0), axis=0)
    first = tl.sum(tl.where(number == expert, start, 0), axis=0) + (tile - before) * BLOCK_M
    return expert, first, tl.sum(tl.where(number == expert, end, 0), axis=0)


class PairTiles(NamedTuple):
    """Sorted pairs, and how many tiles there may be."""

    order: Tensor  # (N,) int32, the pairs; those that are in no tile come first, unwritten
    starts: Tensor  # (E,) int32, where those of an expert begin
    skipped: Tensor | None  # (1,) int32, how many are in no tile; None: none is
    size: int  # pairs of a tile
    count: int


def sort_pairs(
    chosen: Tensor, experts: int, size: int, own: ExpertSlice | None = None
) -> PairTiles:
    """Sort pairs by their experts (T, K) int64, into tiles of so many; `own`: of a slice."""
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    launch(
        sort_kernel,
        (experts,),
        chosen,
        order,
        starts,
        pairs,
        0 if own is None else own.first,
        EXPERTS=experts,
        SLICED=own is not None,
        BLOCK=PASS,
    )
    # Each expert that has pairs may have one tile that is not full.
    count = pairs // size + min(pairs, experts)
    return PairTiles(order, starts, None if own is None else starts[:1], size, count)
