"""Which choice a stream number stands for, and the rows that columns stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.codec import ID_BYTES, unpack_ids, unpack_numbers
from antiphon.wire.token_outputs import TokenOutputs
from antiphon.wire.tokens import TokenColumns, TokenRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.detokenizer.choice import DetokenizerRequest
    from antiphon.wire.base import Attempt, Process
    from antiphon.wire.ids import RequestId


@dataclass(frozen=True, slots=True)
class NumberedStream:
    """A choice of an attempt. With outputs, each of its tokens has at least its id among them."""

    request_id: RequestId
    choice: int
    attempt: Attempt
    has_outputs: bool


class StreamTable:
    """The numbered streams of each worker process, as its rows introduce them.

    One that has ended stays until its request is forgotten: late tokens of it are expected.
    """

    def __init__(self) -> None:
        self._streams: dict[Process, dict[int, NumberedStream]] = {}
        self._numbers: dict[RequestId, list[tuple[Process, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def add(self, worker: Process, row: TokenRow, request: DetokenizerRequest) -> None:
        """Note the number in an accepted row of a request, if it has one."""
        if (number := row.stream_number) is None:
            return
        streams = self._streams.setdefault(worker, {})
        known = streams.get(number)
        if known is not None and known.attempt >= row.attempt:
            return
        has_outputs = request.stream.details_from is not None
        streams[number] = NumberedStream(row.request_id, row.choice, row.attempt, has_outputs)
        self._numbers.setdefault(row.request_id, []).append((worker, number))

    def rows(self, worker: Process, columns: TokenColumns) -> Iterator[TokenRow | None]:
        """Yield the row of each token; None for one of an unknown stream."""
        streams = self._streams.get(worker, {})
        tokens, logprobs = columns.token_ids, columns.logprobs
        numbers, offsets = unpack_numbers(columns.streams), unpack_ids(columns.offsets)
        starts = range(0, len(tokens), ID_BYTES)
        for number, offset, start in zip(numbers, offsets, starts, strict=True):
            if (stream := streams.get(number)) is None:
                yield None
                continue
            token, outputs = tokens[start : start + ID_BYTES], None
            if stream.has_outputs:
                logprob = logprobs[start : start + ID_BYTES]
                outputs = TokenOutputs(count=1, token_ids=token, logprobs=logprob)
            yield TokenRow(
                request_id=stream.request_id,
                choice=stream.choice,
                attempt=stream.attempt,
                offset=offset,
                token_ids=token,
                details=outputs,
            )

    def forget(self, request_id: RequestId) -> None:
        for worker, number in self._numbers.pop(request_id, ()):
            if (streams := self._streams.get(worker)) is not None:
                streams.pop(number, None)

    def forget_worker(self, worker: Process) -> None:
        """Drop the streams of a dead worker."""
        self._streams.pop(worker, None)
