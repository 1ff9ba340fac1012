"""Positions of tokens along three axes, where a prompt holds media: time, row and column.

A text has its index on all axes. An image has one time, and the rows and columns of its grid, a
video several times; what comes after it goes on behind the largest of these, so that behind the
last medium of a prompt a position is the index in the sequence and one offset. Only tokens before
that need arrays.

Source: multimodal RoPE of Wang et al. 2024, arXiv:2409.12191, section 2.1; times that are seconds
apart: Bai et al. 2025, arXiv:2502.13923, section 2.1.2.

Axes: P tokens of the prompt up to the end of its last medium; R placeholders of a medium.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.wire.media import MediumSpan

AXES = 3


def media_positions(media: Iterable[tuple[MediumSpan, Ints]]) -> tuple[Ints, int]:
    """The positions (3, P) of these media and of what is before them, and the offset after them.

    Each medium has its span and the indices (R,) of its placeholders.
    """
    parts = [np.zeros((AXES, 0), np.int32)]
    index = offset = 0
    for span, places in media:
        if not span.columns:
            continue  # as text
        for start, tokens in grid_runs(places):
            parts.append(_text(index + offset, start + offset))
            grid = _grid(span, tokens)
            parts.append(grid + np.int32(start + offset))
            index = start + tokens
            offset += int(grid.max()) + 1 - tokens
    return np.concatenate(parts, axis=1), offset


def grid_runs(places: Ints) -> list[tuple[int, int]]:
    """The first index and the length of each run of placeholders (R,): of each grid."""
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return [(int(run[0]), len(run)) for run in runs]


def _grid(span: MediumSpan, tokens: int) -> Ints:
    """Time, row and column of the tokens of a grid, (3, tokens)."""
    times = max(1, span.times)
    rows = tokens // (times * span.columns)
    grid = np.indices((times, rows, span.columns), np.int32).reshape(AXES, -1)
    # In float32, and whole, as transformers has them.
    grid[0] = (grid[0].astype(np.float32) * np.float32(span.step)).astype(np.int32)
    return grid


def _text(start: int, end: int) -> Ints:
    return np.tile(np.arange(start, end, dtype=np.int32), (AXES, 1))
