"""A held request: its outputs, and which of them were sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.codec import ID_BYTES
from antiphon.wire.token_outputs import TokenOutputsBuffer
from antiphon.wire.tokens import TokenRow, TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.model_worker.batching.state import ChoiceKey, Finish, Progress
    from antiphon.wire.command import Admit, ChoiceOutput

ROW_IDS_MAX = 16_384
"""Maximum ids of a row: a replay after an outage is split into messages of a sane size."""
ROW_DETAILS_BYTES_MAX = 64 * 1024
"""Maximum bytes of a row's logprobs and hidden states."""


@dataclass(frozen=True, slots=True)
class OutputOrigin:
    """The weights that sampled the outputs from `start` on, and the retractions before."""

    start: int
    weights: str
    retractions: int


class HeldChoice:
    """The outputs of one choice: the only place from which its tokens are sent again.

    Their logprobs and hidden states are here too: those of prompt tokens at negative offsets, then
    those of each output.
    """

    # Slots, not a dictionary: there, each attribute that a step reads costs a cache line.
    __slots__ = (
        "_attempt", "_details", "_end_sent", "_first", "_ids", "_marks", "_marks_sent",
        "_request_id", "_sent", "_stopped", "finish", "index", "key",
    )  # fmt: skip

    def __init__(
        self, admit: Admit, output: ChoiceOutput, key: ChoiceKey, details: TokenOutputsBuffer | None
    ) -> None:
        self._request_id = admit.request_id
        self._attempt = admit.attempt
        self.index = output.choice
        self.key = key
        self.finish: Finish | None = None
        self._ids = bytearray(output.output_ids)
        self._details = details
        self._first = 0 if details is None else details.first
        self._sent = self._first
        self._end_sent = False
        self._stopped = False
        self._marks: list[OutputOrigin] = []
        self._marks_sent = 0

    @property
    def length(self) -> int:
        return len(self._ids) // ID_BYTES

    @property
    def live(self) -> bool:
        return self.finish is None and not self._stopped

    def append(self, progress: Progress) -> None:
        assert self.live, "a choice continued after its end"
        if progress.token_ids or not self._marks:
            self._mark(progress)
        self._ids += progress.token_ids
        if self._details is not None:
            self._details.append(progress.details)
            assert self._details.end >= self.length or not self.length, "a token has no details"
        self.finish = progress.finish

    def fail(self, finish: Finish) -> None:
        self.finish = finish
        self._sent = self._end

    @property
    def even(self) -> bool:
        """Whether it runs without logprobs, and all of it was sent, its `TokenStream` included."""
        if self._sent != self.length or self._marks_sent < len(self._marks):
            return False
        return self.live and self._details is None and bool(self._marks)

    def go_on(self, token_ids: bytes) -> None:
        """Add ids of an `even` choice that were sent already."""
        assert self.live, "a choice continued after its end"
        self._ids += token_ids
        self._sent = self.length

    def last_row(self) -> TokenRow:
        """The row of its last token, as `unsent` makes it of plain ids."""
        return self._plain_row(self.length - 1)

    def _plain_row(self, offset: int) -> TokenRow:
        return TokenRow(
            request_id=self._request_id,
            choice=self.index,
            attempt=self._attempt,
            offset=offset,
            token_ids=bytes(self._ids[offset * ID_BYTES :]),
        )

    def stop(self, offset: int | None = None) -> int:
        """End it without a finish message, cut at `offset`; return the number of ids cut off."""
        length = self.length if offset is None else min(self.length, max(0, offset))
        overrun = self.length - length
        del self._ids[length * ID_BYTES :]
        if self._details is not None:
            self._details.truncate(length)
        self._stopped = True
        return overrun

    def silence(self) -> None:
        self._stopped = True

    def rewind(self, offset: int) -> None:
        """Send again from `offset` on, the finish included."""
        self._sent = min(max(self._first, offset), self._end)
        self._end_sent = False
        self._marks_sent = 0

    def take_plain(self) -> TokenRow | None:
        """Take the unsent ids, if they are one row without anything else.

        So it is for nearly every row: this costs a third of `unsent`.
        """
        sent, length = self._sent, self.length
        if self._details is not None or self.finish is not None or self._stopped:
            return None
        if not sent < length <= sent + ROW_IDS_MAX or self._marks_sent < len(self._marks):
            return None
        self._sent = length
        return self._plain_row(sent)

    def unsent(self, stream: TokenStream | None) -> Iterator[TokenRow]:
        """Take what was not sent yet, in rows of bounded size and a single origin each.

        The first row carries `stream`.
        """
        if self._stopped:
            return
        while self._sent < self._end or (self.finish is not None and not self._end_sent):
            offset = self._sent
            # A row holds prompt tokens or output tokens: only the latter have ids.
            border = 0 if offset < 0 <= self._end else self._end
            # The first origin is no border: outputs before it came with the admit.
            border = min([border, *(mark.start for mark in self._marks[1:] if mark.start > offset)])
            self._sent = min(border, offset + self._row_tokens_max())
            self._end_sent = self.finish is not None and self._sent == self._end
            ids = bytes(self._ids[max(0, offset) * ID_BYTES : max(0, self._sent) * ID_BYTES])
            finish = self.finish if self._end_sent else None
            origin = self._news(offset, self._sent)
            yield TokenRow(
                request_id=self._request_id,
                choice=self.index,
                attempt=self._attempt,
                offset=offset,
                token_ids=ids,
                details=None if self._details is None else self._details.read(offset, self._sent),
                stream=stream,
                weights=origin.weights if origin else None,
                retractions=origin.retractions if origin else 0,
                finish_reason=finish.reason if finish else None,
                matched_stop=finish.matched_stop if finish else None,
                error=finish.error if finish else None,
            )
            stream = None

    def _mark(self, progress: Progress) -> None:
        """Note the origin of the next outputs, if it differs from the last one."""
        mark = OutputOrigin(self.length, progress.weights, progress.retractions)
        if self._marks:
            last = self._marks[-1]
            if (last.weights, last.retractions) == (mark.weights, mark.retractions):
                return
            if last.start == mark.start:
                self._marks.pop()
                self._marks_sent = min(self._marks_sent, len(self._marks))
        self._marks.append(mark)

    def _news(self, offset: int, end: int) -> OutputOrigin | None:
        """The origin of the outputs up to `end`, if it was not sent yet.

        Prompt tokens have the first one.
        """
        reached = sum(mark.start <= max(0, offset) or mark.start < end for mark in self._marks)
        if reached <= self._marks_sent:
            return None
        self._marks_sent = reached
        return self._marks[reached - 1]

    @property
    def _end(self) -> int:
        return self.length if self._details is None else self._details.end

    def _row_tokens_max(self) -> int:
        if self._details is None or not self._details.token_bytes:
            return ROW_IDS_MAX
        return min(ROW_IDS_MAX, max(1, ROW_DETAILS_BYTES_MAX // self._details.token_bytes))


class HeldRequest:
    """A request from its admission until its owner no longer lists it.

    Its prompt is not here: the batching loop has it, and it is never sent.
    """

    def __init__(self, admit: Admit, keys: Sequence[ChoiceKey], now_ms: int, due_ms: int) -> None:
        self.request_id = admit.request_id
        self.owner = admit.owner
        self.attempt = admit.attempt
        self.detokenizer = admit.detokenizer
        self.steps = admit.steps  # its detokenizer reads `TokenStep`
        self.deadline_unix_ms = admit.deadline_unix_ms  # by its owner's clock
        self.due_ms = due_ms  # by ours
        self.admitted_ms = now_ms
        self.cached_tokens = 0
        self.listed_after_end = False
        self.started = False
        self.requeued = False  # heartbeats list it until the leader runs another attempt
        self._prompt_tokens = len(admit.prompt_ids) // ID_BYTES
        self.tokens_max = self._prompt_tokens + admit.sampling.max_new_tokens
        self._details_from = admit.sampling.details_from(self._prompt_tokens)
        self.choices = [
            HeldChoice(admit, choice, key, self._detail_store(choice))
            for choice, key in zip(admit.choices, keys, strict=True)
        ]
        self._continues = admit.continues
        self._stop = admit.stop
        self._traceparent = admit.traceparent
        self._introduced = False

    @property
    def live(self) -> bool:
        return any(choice.live for choice in self.choices)

    @property
    def tokens(self) -> int:
        return sum(choice.length for choice in self.choices)

    def rewind(self, offsets: dict[int, int]) -> None:
        """Send again from these offsets on, by choice; from the start where none is given."""
        self._introduced = False
        for choice in self.choices:
            choice.rewind(offsets.get(choice.index, self._details_from or 0))

    def repeat_end(self) -> None:
        self.rewind({choice.index: choice.length for choice in self.choices})

    def unsent(self) -> list[TokenRow]:
        """Take the rows that were not sent yet; the first of all carries the `TokenStream`."""
        rows: list[TokenRow] = []
        for choice in self.choices:
            plain = choice.take_plain() if self._introduced else None
            if plain is not None:
                rows.append(plain)
                continue
            for row in choice.unsent(None if self._introduced else self._stream()):
                self._introduced = True
                rows.append(row)
        return rows

    def _detail_store(self, choice: ChoiceOutput) -> TokenOutputsBuffer | None:
        if self._details_from is None:
            return None
        store = TokenOutputsBuffer(self._details_from)
        if choice.details is not None and choice.output_ids:
            store.append(choice.details)
        return store

    def _stream(self) -> TokenStream:
        return TokenStream(
            owner=self.owner,
            prompt_tokens=self._prompt_tokens,
            details_from=self._details_from,
            cached_tokens=self.cached_tokens,
            choices=len(self.choices),
            continues=self._continues,
            stop=self._stop,
            deadline_unix_ms=self.deadline_unix_ms,
            traceparent=self._traceparent,
        )
