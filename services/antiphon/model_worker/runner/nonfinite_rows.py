"""Which rows of a forward pass have a NaN or infinity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.model_worker.runner.input_batch import InputBatch


def failed_rows(
    batch: InputBatch, rows: int, tokens: Tensor | None, logits: Tensor | None
) -> NDArray[np.bool_] | None:
    """Which rows hold a NaN or infinity, (R,); None if none does.

    Hidden states count too: a prefill chunk has no logits, and other requests share its pages as
    soon as it is committed to the prefix cache.

    Args:
        batch: Maps tokens and logits to rows.
        rows: R.
        tokens: (T,) whether all elements of a token's hidden state are finite; None: all are.
        logits: (L,) likewise for rows of logits.
    """
    if tokens is None and logits is None:
        return None
    failed = np.zeros(rows, np.bool_)
    for finite, row in ((tokens, batch.token_row), (logits, batch.logit_row)):
        if finite is not None:
            failed[row[~finite.cpu().numpy()]] = True
    return failed
