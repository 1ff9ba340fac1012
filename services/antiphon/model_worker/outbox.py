"""What is to be sent to the detokenizers, as numbered batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.parts import parts
from antiphon.wire.tokens import TokenBatch, TokenRow

if TYPE_CHECKING:
    from antiphon.model_worker.held import HeldRequest
    from antiphon.service.sequence import SeqSender
    from antiphon.wire.base import Process
    from antiphon.wire.ids import InstanceId, RequestId

BATCH_BYTES_MAX = 128 * 1024
"""About the largest token batch: far below what the broker takes, small beside other traffic."""
RELAYED_ROWS_MAX = 256
"""Relayed rows that surely fit into one batch, for their ids are as short as the rest of them."""

_ROW_BYTES = 256  # a row without its ids, about


class Outbox:
    """Requests of which something is unsent, and rows that are made already.

    Attributes:
        step: The last one of which something was put in.
    """

    def __init__(self, process: Process, seqs: SeqSender) -> None:
        self.step = 0
        self._process = process
        self._seqs = seqs
        self._unsent: dict[RequestId, HeldRequest] = {}
        self._relayed: dict[InstanceId, list[TokenRow]] = {}

    @property
    def filled(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._relayed or self._unsent)

    def put(self, held: HeldRequest) -> None:
        """Something of a request is to be sent."""
        self._unsent[held.request_id] = held

    def relay(self, detokenizer: InstanceId, rows: list[TokenRow]) -> None:
        """Rows of `HeldChoice.relay` are to be sent; `take` follows at once."""
        assert detokenizer not in self._relayed, "rows were relayed and not taken"
        self._relayed[detokenizer] = rows

    def remove(self, held: HeldRequest) -> None:
        """What is unsent of a request stays so."""
        self._unsent.pop(held.request_id, None)

    def take(self) -> list[tuple[InstanceId, TokenBatch]]:
        """All that is in it, as numbered batches, ready to be published in this order."""
        rows, self._relayed = self._relayed, {}
        relayed = not self._unsent
        for held in self._unsent.values():
            rows.setdefault(held.detokenizer, []).extend(held.unsent())
        self._unsent.clear()
        return [
            (detokenizer, self._batch(detokenizer, part))
            for detokenizer, all_rows in rows.items()
            for part in (
                (all_rows,)
                if relayed and len(all_rows) <= RELAYED_ROWS_MAX
                else parts(all_rows, _row_bytes, BATCH_BYTES_MAX)
            )
        ]

    def _batch(self, detokenizer: InstanceId, rows: list[TokenRow]) -> TokenBatch:
        return TokenBatch(
            worker=self._process,
            seq=self._seqs.next(detokenizer),
            step=self.step,
            rows=tuple(rows),
        )


def _row_bytes(row: TokenRow) -> int:
    if row.stream is None and row.details is None:
        return _ROW_BYTES + len(row.token_ids)
    strings = row.stream.stop.texts if row.stream is not None else ()
    details = 0 if row.details is None else row.details.size_bytes
    texts = sum(len(string.encode()) for string in strings)
    return _ROW_BYTES + len(row.token_ids) + details + texts
