"""Which rows of a pass came out with numbers that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.model_worker.model.decoder import Hidden
    from antiphon.model_worker.runner.batch import Batch


def failed_rows(
    ops: Ops, batch: Batch, rows: int, left: Hidden, logits: Tensor
) -> NDArray[np.bool_] | None:
    """Which rows hold a NaN or infinity, (R,); None: none does.

    Hidden states count too: a chunk of a prompt has no logits, and its pages are shared with other
    requests as soon as it is committed.
    """
    tokens = left.finite if left.checked else ops.finite_rows(left.last)
    drawing = ops.finite_rows(logits)
    if tokens is None and drawing is None:
        return None
    failed = np.zeros(rows, np.bool_)
    for finite, row in ((tokens, batch.token_row), (drawing, batch.logit_row)):
        if finite is not None:
            failed[row[~finite.cpu().numpy()]] = True
    return failed
