"""What is to be sent to the detokenizers, as numbered messages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.wire.codec import split_rows
from antiphon.wire.tokens import TokenBatch, TokenColumns, TokenRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from antiphon.model_worker.protocol.held_request import HeldRequest
    from antiphon.model_worker.protocol.plain_streams import PlainStreams
    from antiphon.service.sequence import SeqSender
    from antiphon.wire.base import Process
    from antiphon.wire.ids import InstanceId, RequestId

log = logging.getLogger(__name__)

BATCH_BYTES_MAX = 128 * 1024
"""About the largest token batch: far below what the broker takes, small beside other traffic."""
_ROW_BYTES = 256  # a row without its ids, about


class TokenOutbox:
    """Columns of plain streams, and requests of which something else is unsent.

    Attributes:
        step: The last one of which something was put in.
    """

    def __init__(
        self,
        process: Process,
        seqs: SeqSender,
        plain: PlainStreams,
        fail: Callable[[RequestId], None],
    ) -> None:
        """`fail` ends a request of which rows cannot be made."""
        self.step = 0
        self._process = process
        self._seqs = seqs
        self._plain = plain
        self._fail = fail
        self._columns: dict[InstanceId, list[TokenColumns]] = {}
        self._unsent: dict[RequestId, HeldRequest] = {}

    @property
    def filled(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._columns or self._unsent)

    def put(self, held: HeldRequest) -> None:
        """Something of a request is to be sent."""
        self._unsent[held.request_id] = held

    def put_columns(self, columns: Mapping[InstanceId, TokenColumns]) -> None:
        for detokenizer, tokens in columns.items():
            self._columns.setdefault(detokenizer, []).append(tokens)

    def drop_columns(self, detokenizer: InstanceId) -> None:
        """The tokens in these are sent otherwise."""
        self._columns.pop(detokenizer, None)

    def remove(self, held: HeldRequest) -> None:
        """What is unsent of a request stays so."""
        self._unsent.pop(held.request_id, None)

    def take(self) -> list[tuple[InstanceId, TokenBatch]]:
        """All that is in it, as numbered messages, to be published now and in this order.

        Choices of which nothing is unsent then become plain streams.
        """
        columns, self._columns = self._columns, {}
        unsent, self._unsent = self._unsent, {}
        rows = {detokenizer: list[TokenRow]() for detokenizer in columns}
        for held in unsent.values():
            try:
                rows.setdefault(held.detokenizer, []).extend(held.unsent())
            except Exception:
                log.exception("rows failed", extra={"request_id": held.request_id})
                self._fail(held.request_id)
                continue
            for choice in held.choices:
                if choice.can_be_plain:
                    self._plain.open(choice, held.detokenizer)
        return [
            (detokenizer, batch)
            for detokenizer, some in rows.items()
            for batch in self._batches(detokenizer, columns.get(detokenizer, []), some)
        ]

    def _batches(
        self, detokenizer: InstanceId, columns: list[TokenColumns], rows: list[TokenRow]
    ) -> Iterator[TokenBatch]:
        """The columns of a step each, in their order; rows come after all of them."""
        *earlier, last = columns or [None]
        for each in earlier:
            yield self._batch(detokenizer, each)
        for part in split_rows(rows, _row_bytes, BATCH_BYTES_MAX):
            yield self._batch(detokenizer, last, part)
            last = None
        if last is not None:
            yield self._batch(detokenizer, last)

    def _batch(
        self, detokenizer: InstanceId, columns: TokenColumns | None, rows: Iterable[TokenRow] = ()
    ) -> TokenBatch:
        return TokenBatch(
            worker=self._process,
            seq=self._seqs.next(detokenizer),
            step=self.step,
            rows=tuple(rows),
            columns=columns,
        )


def _row_bytes(row: TokenRow) -> int:
    size = _ROW_BYTES + len(row.token_ids)
    if row.details is not None:
        size += row.details.size_bytes
    if row.stream is not None:
        size += sum(len(text.encode()) for text in row.stream.stop.texts)
    return size
