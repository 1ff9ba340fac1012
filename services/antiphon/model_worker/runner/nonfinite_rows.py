"""Which rows of a pass came out with numbers that are not finite."""

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
    """Which rows hold a NaN or infinity, (R,); None: none does.

    Hidden states count too: a chunk of a prompt has no logits, and its pages are shared with other
    requests as soon as it is committed.

    Args:
        batch: Says whose they are.
        rows: R.
        tokens: (T,) whether all numbers of a token's hidden state are finite; None: of all.
        logits: (L,) the same of rows of logits.
    """
    if tokens is None and logits is None:
        return None
    failed = np.zeros(rows, np.bool_)
    for finite, row in ((tokens, batch.token_row), (logits, batch.logit_row)):
        if finite is not None:
            failed[row[~finite.cpu().numpy()]] = True
    return failed
