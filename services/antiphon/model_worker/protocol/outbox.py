"""What is to be sent to the detokenizers, as numbered messages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.wire.codec import split_rows
from antiphon.wire.tokens import TokenBatch, TokenNews, TokenRow, TokenStep

if TYPE_CHECKING:
    from antiphon.model_worker.batching.steady import Drawn

    from antiphon.model_worker.lanes import Lane
    from antiphon.model_worker.protocol.held_request import HeldRequest
    from antiphon.service.sequence import SeqSender
    from antiphon.wire.base import Process
    from antiphon.wire.ids import InstanceId, RequestId

log = logging.getLogger(__name__)

BATCH_BYTES_MAX = 128 * 1024
"""About the largest token batch: far below what the broker takes, small beside other traffic."""
_ROW_BYTES = 256  # a row without its ids, about


class TokenOutbox:
    """Requests of which something is unsent, and what has just passed through lanes.

    Attributes:
        step: The last one of which something was put in.
        broken: Requests of which rows could not be made.
    """

    def __init__(self, process: Process, seqs: SeqSender) -> None:
        self.step = 0
        self._process = process
        self._seqs = seqs
        self._unsent: dict[RequestId, HeldRequest] = {}
        self._relayed: list[tuple[Lane, bytes]] = []
        self._followed: dict[InstanceId, Lane] = {}  # whose rows the last message had
        self.broken: list[HeldRequest] = []

    @property
    def filled(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._relayed or self._unsent)

    def put(self, held: HeldRequest) -> None:
        """Something of a request is to be sent."""
        self._unsent[held.request_id] = held

    def relay(self, lane: Lane, drawn: Drawn) -> None:
        """What a step drew for the choices of a lane is to be sent; `take` follows at once."""
        assert all(lane is not other for other, _ in self._relayed), "it was relayed and not taken"
        self._relayed.append((lane, lane.take(drawn)))

    def leave_lanes(self) -> None:
        """What is relayed next comes through other lanes."""
        self._followed.clear()

    def remove(self, held: HeldRequest) -> None:
        """What is unsent of a request stays so."""
        self._unsent.pop(held.request_id, None)

    def take(self) -> list[tuple[InstanceId, TokenNews]]:
        """All that is in it, as numbered messages, ready to be published in this order."""
        relayed, self._relayed = self._relayed, []
        messages = [(lane.detokenizer, self._step(lane, ids)) for lane, ids in relayed]
        if self._unsent:
            messages += self._batches()
        return messages

    def _step(self, lane: Lane, token_ids: bytes) -> TokenNews:
        """A message of what a lane has taken: of ids alone if the one before had its rows."""
        detokenizer = lane.detokenizer
        if self._followed.get(detokenizer) is lane:
            seq = self._seqs.next(detokenizer)
            return TokenStep(worker=self._process, seq=seq, step=self.step, token_ids=token_ids)
        batch = self._batch(detokenizer, lane.rows())
        self._followed[detokenizer] = lane
        return batch

    def _batches(self) -> list[tuple[InstanceId, TokenNews]]:
        """Batches of all that is unsent."""
        rows: dict[InstanceId, list[TokenRow]] = {}
        unsent, self._unsent = self._unsent, {}
        for held in unsent.values():
            try:
                rows.setdefault(held.detokenizer, []).extend(held.unsent())
            except Exception:
                log.exception("rows failed", extra={"request_id": held.request_id})
                self.broken.append(held)
        return [
            (detokenizer, self._batch(detokenizer, part))
            for detokenizer, all_rows in rows.items()
            for part in split_rows(all_rows, _row_bytes, BATCH_BYTES_MAX)
        ]

    def _batch(self, detokenizer: InstanceId, rows: list[TokenRow]) -> TokenBatch:
        self._followed.pop(detokenizer, None)
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
