"""Sums in the order of ranks: every rank has the parts of all, and adds one after the other.

So all of them have the same bits, which depend on nothing else in the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


def sum_in_order(
    x: Tensor, piece_bytes: int, exchange: Callable[[Tensor], Sequence[Tensor]]
) -> Tensor:
    """The sum over ranks, each addition in the dtype of `x`, which may be overwritten.

    `exchange` returns those of all ranks, in their order and in memory of their own, for a piece of
    at most so many bytes.
    """
    x = x.contiguous()
    for piece in pieces(x, piece_bytes):
        first, second, *others = exchange(piece)
        torch.add(first, second, out=piece)
        for other in others:
            piece.add_(other)
    return x


def pieces(x: Tensor, piece_bytes: int) -> Iterator[Tensor]:
    """Parts of a contiguous tensor, flat, of at most so many bytes; an empty tensor is one, too."""
    flat, longest = x.view(-1), piece_bytes // x.element_size()
    if len(flat) <= longest:
        yield flat
    else:
        for start in range(0, len(flat), longest):
            yield flat[start : start + longest]
