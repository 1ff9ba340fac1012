"""Expands `TokenStep` messages, which do not name their rows, to batches.

Workers up to version 0.4 send them. They are read for one more release, so that workers and
detokenizers can be replaced in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.codec import ID_BYTES
from antiphon.wire.tokens import TokenBatch, TokenNews, TokenRow, TokenStep

if TYPE_CHECKING:
    from antiphon.wire.base import Process


class Unfolding:
    """The last message of each worker, as a batch: a step carries only the new ids for it."""

    def __init__(self) -> None:
        self._last: dict[Process, TokenBatch] = {}

    def batch(self, news: TokenNews) -> TokenBatch | None:
        """The message as a batch; None for a step that does not follow the last message."""
        last = self._last.get(news.worker)
        batch = _unfolded(news, last) if isinstance(news, TokenStep) else news
        if batch is not None and (last is None or batch.seq > last.seq):
            self._last[news.worker] = batch
        return batch

    def forget(self, worker: Process) -> None:
        """Drop the last message of a dead worker."""
        self._last.pop(worker, None)


def _unfolded(step: TokenStep, last: TokenBatch | None) -> TokenBatch | None:
    ids = step.token_ids
    if last is None or step.seq != last.seq + 1 or len(ids) != ID_BYTES * len(last.rows):
        return None
    rows = tuple(
        TokenRow(
            request_id=row.request_id,
            choice=row.choice,
            attempt=row.attempt,
            offset=row.offset + len(row.token_ids) // ID_BYTES,
            token_ids=ids[start : start + ID_BYTES],
        )
        for row, start in zip(last.rows, range(0, len(ids), ID_BYTES), strict=True)
    )
    return TokenBatch(worker=step.worker, seq=step.seq, step=step.step, rows=rows)
