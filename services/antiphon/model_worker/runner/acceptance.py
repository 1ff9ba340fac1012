"""How many of a row's sampled tokens are accepted: one, or in a verify row those that match drafts.

A verify row requests logits at several of its tokens; each later token is a draft of the token that
the one before it predicts. The random numbers of sampling depend on the position alone, so
accepting drafts while they equal the sample gives, token for token, what decoding one by one would
give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from antiphon.model_worker.batching.plan import Ints, Longs


def accept(
    tokens: Ints,
    logit_tokens: Ints,
    logit_row: Longs,
    sampled: Ints,
    rows: int,
    failed: NDArray[np.bool_] | None,
) -> tuple[Ints, Ints]:
    """Accept a row's samples up to and including the first that differs from its draft.

    Axes: T tokens, L rows of logits, R rows, S accepted tokens.
    tokens (T,) with futures resolved; logit_tokens, logit_row, sampled (L,); failed (R,) bool, or
    None if none has  ->  starts (R + 1,), token_ids (S,), both int32; a failed row has none
    """
    following = tokens[np.minimum(logit_tokens + 1, len(tokens) - 1)]
    missed = (following != sampled).astype(np.int64)
    earlier = np.cumsum(missed) - missed  # misses before this one, over all rows
    first = np.searchsorted(logit_row, logit_row)  # (L,) index of the first of the same row
    accepted = earlier == earlier[first]
    if failed is not None:
        accepted &= ~failed[logit_row]
    starts = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(logit_row[accepted], minlength=rows), out=starts[1:])
    return starts, sampled[accepted].astype(np.int32)
