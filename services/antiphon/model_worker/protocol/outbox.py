"""What is to be sent to the detokenizers: tokens of plain streams as columns, all else as rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.state import WIRE_IDS
from antiphon.wire.codec import split_rows
from antiphon.wire.tokens import TokenBatch, TokenColumns, TokenRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from antiphon.model_worker.batching.plan import Longs
    from antiphon.model_worker.batching.state import SampledTokens
    from antiphon.model_worker.protocol.held_request import HeldChoice, HeldRequest
    from antiphon.service.sequence import SeqSender
    from antiphon.wire.base import Process
    from antiphon.wire.ids import InstanceId, RequestId

log = logging.getLogger(__name__)

BATCH_BYTES_MAX = 128 * 1024
"""About the largest token batch: far below what the broker takes, small beside other traffic."""
_ROW_BYTES = 256  # a row without its ids, about
_KEYS, _LOGPROBS = np.dtype("<i8"), np.dtype("<f4")


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
        if not self._unsent:  # as in most steps
            return [
                (each, self._batch(each, one)) for each, some in columns.items() for one in some
            ]
        unsent, self._unsent = self._unsent, {}
        rows = {detokenizer: list[TokenRow]() for detokenizer in columns}
        for held in unsent.values():
            some = rows.setdefault(held.detokenizer, [])
            try:
                some.extend(held.unsent())  # those before one that cannot be made are in it, too
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


class PlainStreams:
    """Live choices of which everything was sent, by slot: their next tokens go into columns.

    So a step is sent by a few operations on arrays, whatever the number of its rows. How long the
    outputs of a choice are is known only here, until its stream is closed.

    Axes: S slots.
    """

    def __init__(self, slots_max: int) -> None:
        self._choices: dict[int, HeldChoice] = {}
        self._keys: Longs = np.zeros(slots_max, np.int64)  # (S,) 0: no plain stream
        self._lengths = np.zeros(slots_max, np.int32)  # (S,)
        self._has_logprobs = np.zeros(slots_max, np.bool_)  # (S,)
        self._channels = np.zeros(slots_max, np.int32)  # (S,) index of the detokenizer
        self._detokenizers: list[InstanceId] = []

    def open(self, choice: HeldChoice, detokenizer: InstanceId) -> None:
        """Begin with a choice of which everything was sent."""
        slot = choice.slot
        if (previous := self._choices.get(slot)) is not None:
            self.close(previous)  # it was retracted: the next progress names another slot
        if detokenizer not in self._detokenizers:
            self._detokenizers.append(detokenizer)
        self._choices[slot] = choice
        self._keys[slot] = choice.key
        self._lengths[slot] = choice.length
        self._has_logprobs[slot] = choice.has_logprobs
        self._channels[slot] = self._detokenizers.index(detokenizer)

    def close(self, choice: HeldChoice) -> None:
        """End a plain stream, before anything but the next token happens to its choice."""
        slot = choice.slot
        if self._choices.get(slot) is choice:
            del self._choices[slot]
            self._keys[slot] = 0
            choice.mark_sent(self._lengths.item(slot))

    def close_all(self) -> None:
        for choice in list(self._choices.values()):
            self.close(choice)

    def write_lengths(self) -> None:
        """Write the lengths to the choices."""
        for slot, choice in self._choices.items():
            choice.mark_sent(self._lengths.item(slot))

    def take(
        self, sampled: SampledTokens
    ) -> tuple[dict[InstanceId, TokenColumns], SampledTokens | None]:
        """The columns for each detokenizer; and the tokens of those that are not plain, if any."""
        others = None
        rowwise = self._keys.take(sampled.slots) != sampled.keys
        if len(rowwise.nonzero()[0]):
            others, sampled = sampled.take(rowwise), sampled.take(~rowwise)
            if not len(sampled):
                return {}, others
        self._lengths[sampled.slots] = sampled.offsets + 1
        if len(self._detokenizers) == 1:
            return {self._detokenizers[0]: self._columns(sampled)}, others
        channels = self._channels.take(sampled.slots)
        return {
            self._detokenizers[channel]: self._columns(sampled.take(channels == channel))
            for channel in set(channels.tolist())
        }, others

    def _columns(self, sampled: SampledTokens) -> TokenColumns:
        logprobs = sampled.logprobs
        if logprobs is not None and not (has := self._has_logprobs.take(sampled.slots)).all():
            sampled = sampled.take(np.argsort(~has, kind="stable"))
            logprobs = logprobs[has]
        return TokenColumns(
            streams=sampled.keys.astype(_KEYS, copy=False).tobytes(),
            offsets=sampled.offsets.astype(WIRE_IDS, copy=False).tobytes(),
            token_ids=sampled.ids.astype(WIRE_IDS, copy=False).tobytes(),
            logprobs=b"" if logprobs is None else logprobs.astype(_LOGPROBS, copy=False).tobytes(),
        )


def _row_bytes(row: TokenRow) -> int:
    size = _ROW_BYTES + len(row.token_ids)
    if row.details is not None:
        size += row.details.size_bytes
    if row.stream is not None:
        size += sum(len(text.encode()) for text in row.stream.stop.texts)
    return size
