"""Positions of tokens along three axes, where a prompt holds images: time, row and column.

A text has its index on all axes. An image has one time, and the rows and columns of its grid; what
comes after it goes on behind the largest of these, so that behind the last image of a prompt a
position is the index in the sequence and one offset. Only tokens before that need arrays.

Source: multimodal RoPE of Wang et al. 2024, arXiv:2409.12191, section 2.1.

Axes: P tokens of the prompt up to the end of its last image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.wire.media import MediumSpan

AXES = 3


def image_positions(spans: Iterable[MediumSpan]) -> tuple[Ints, int]:
    """The positions (3, P) of these spans and of what is before them, and the offset after them."""
    parts = [np.zeros((AXES, 0), np.int32)]
    index = offset = 0
    for span in spans:
        if not span.columns:
            continue  # as text
        rows = span.tokens // span.columns
        parts.append(_text(index + offset, span.start + offset))
        grid = np.indices((1, rows, span.columns), np.int32).reshape(AXES, -1)
        parts.append(grid + np.int32(span.start + offset))
        index = span.start + span.tokens
        offset += max(rows, span.columns) - span.tokens
    return np.concatenate(parts, axis=1), offset


def _text(start: int, end: int) -> Ints:
    return np.tile(np.arange(start, end, dtype=np.int32), (AXES, 1))
