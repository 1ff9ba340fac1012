"""How the rows of a plan lie beside each other, which most steps have in common with the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from antiphon.model_worker.batching.plan import Ints, Longs, SamplingColumns

RowShape = tuple[int, int, bool]
"""The slot of a row, how many tokens it has, and whether it draws."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a plan that do not say how far its rows have come.

    Where everybody draws one token after the other, they are made once and shared by many plans:
    to make them anew took half of the time in which a plan of one row is built.

    Attributes:
        shapes: Of each row.
        decodes: Whether every row is one token after which another is drawn.
        draws: (R,) whether it draws.
        row: (T,) of each token.
        index: (T,) of each token in its row.
        sampling: How the slots of the rows draw.
    """

    shapes: Sequence[RowShape]
    decodes: bool
    slot: Ints
    query_start: Ints
    query_len: Ints
    draws: NDArray[np.bool_]
    logit_tokens: Ints
    row: Longs
    index: Ints
    sampling: SamplingColumns

    @classmethod
    def of(cls, shapes: Sequence[RowShape], slots: SamplingColumns) -> Layout:
        """Lay rows of these shapes out, in the order given; `slots` says how each slot draws."""
        columns = zip(*shapes, strict=True)
        slot, query_len = (np.array(next(columns), np.int32) for _ in range(2))
        draws = np.array(next(columns), np.bool_)
        query_end = np.cumsum(query_len, dtype=np.int32)
        query_start = query_end - query_len
        row = np.repeat(np.arange(len(shapes)), query_len)
        return cls(
            shapes=shapes,
            decodes=len(row) == len(shapes) and bool(draws.all()),
            slot=slot,
            query_start=query_start,
            query_len=query_len,
            draws=draws,
            logit_tokens=(query_end - 1)[draws],
            row=row,
            index=np.arange(len(row), dtype=np.int32) - query_start[row],
            sampling=slots.of(slot),
        )
