"""One request as the bus side of the worker holds it: its outputs, and what was sent of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.codec import ID_BYTES
from antiphon.wire.token_outputs import TokenOutputsBuffer
from antiphon.wire.tokens import TokenRow, TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.model_worker.batching.request import ChoiceKey, Finish, Progress
    from antiphon.wire.command import Admit, ChoiceOutput
    from antiphon.wire.token_outputs import TokenOutputs

ROW_IDS_MAX = 16_384
"""Longest row: a replay after an outage still goes in messages of a sane size."""
ROW_DETAILS_BYTES_MAX = 64 * 1024
"""The same for a row's details."""


@dataclass(frozen=True, slots=True)
class OutputOrigin:
    """From one output on, which weights have drawn them, after so many retractions."""

    start: int
    weights: str
    retractions: int


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """What one row says of a choice; `mark` if that is news."""

    offset: int
    ids: bytes
    details: TokenOutputs | None
    origin: OutputOrigin | None
    finish: Finish | None


class HeldChoice:
    """The outputs of one choice: the only place from which its tokens are ever sent again.

    What is told of its tokens is here too: of so many tokens of the prompt, at negative offsets,
    and then of each output.
    """

    # Of attributes in a dictionary each that a step needs is a line of memory by itself.
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
        """Output ids so far."""
        return len(self._ids) // ID_BYTES

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return self.finish is None and not self._stopped

    def append(self, progress: Progress) -> None:
        """Take in what a step did to it."""
        assert self.live, "a choice went on after its end"
        if progress.token_ids or not self._marks:
            self._mark(progress)
        self._ids += progress.token_ids
        if self._details is not None:
            self._details.append(progress.details)
            assert self._details.end >= self.length or not self.length, "a token is not told of"
        self.finish = progress.finish

    def fail(self, finish: Finish) -> None:
        """End it with an error, whatever a step did to it."""
        self.finish = finish
        self._sent = self._end

    @property
    def even(self) -> bool:
        """Whether it goes on in plain ids, and all of it was sent, with what its request is."""
        if self._sent != self.length or self._marks_sent < len(self._marks):
            return False
        return self.live and self._details is None and bool(self._marks)

    def go_on(self, token_ids: bytes) -> None:
        """Take in ids that are all the news of an `even` choice, and sent already."""
        assert self.live, "a choice went on after its end"
        self._ids += token_ids
        self._sent = self.length

    def last_row(self) -> TokenRow:
        """The row of its last token, as `unsent` makes it of what is plain."""
        offset = self.length - 1
        return TokenRow(
            request_id=self._request_id,
            choice=self.index,
            attempt=self._attempt,
            offset=offset,
            token_ids=bytes(self._ids[offset * ID_BYTES :]),
        )

    def stop(self, offset: int | None = None) -> int:
        """End it without a word, cut off at `offset`; return how many ids went too far."""
        length = self.length if offset is None else min(self.length, max(0, offset))
        overrun = self.length - length
        del self._ids[length * ID_BYTES :]
        if self._details is not None:
            self._details.truncate(length)
        self._stopped = True
        return overrun

    def silence(self) -> None:
        """End it as it is: nothing more is sent of it."""
        self._stopped = True

    def rewind(self, offset: int) -> None:
        """Send again from `offset` on, its end included."""
        self._sent = min(max(self._first, offset), self._end)
        self._end_sent = False
        self._marks_sent = 0

    def take_plain(self) -> tuple[int, bytes] | None:
        """Take what was not sent yet as (offset, ids), if it is one row and nothing but ids.

        So it is with nearly every row, and in each step: it costs a third of what `unsent` does.
        """
        sent, length = self._sent, self.length
        if self._details is not None or self.finish is not None or self._stopped:
            return None
        if not sent < length <= sent + ROW_IDS_MAX or self._marks_sent < len(self._marks):
            return None
        self._sent = length
        return sent, bytes(self._ids[sent * ID_BYTES :])

    def unsent(self) -> Iterator[OutputPiece]:
        """Take what was not sent yet, in pieces of bounded size, each of one origin."""
        if self._stopped:
            return
        while self._sent < self._end or (self.finish is not None and not self._end_sent):
            offset = self._sent
            # A row holds tokens of the prompt or of the answer: only these have ids.
            border = 0 if offset < 0 <= self._end else self._end
            # The first mark divides nothing: what was sealed before it is known, or nobody's.
            border = min([border, *(mark.start for mark in self._marks[1:] if mark.start > offset)])
            self._sent = min(border, offset + self._row_tokens_max())
            self._end_sent = self.finish is not None and self._sent == self._end
            ids = bytes(self._ids[max(0, offset) * ID_BYTES : max(0, self._sent) * ID_BYTES])
            details = None if self._details is None else self._details.read(offset, self._sent)
            finish = self.finish if self._end_sent else None
            yield OutputPiece(offset, ids, details, self._news(offset, self._sent), finish)

    def _mark(self, progress: Progress) -> None:
        """Note from where the next outputs come, if they come from elsewhere than the last."""
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
        """The mark of the outputs up to `end`, if a receiver is yet to be told of it.

        What is told of the prompt has the first one.
        """
        reached = sum(mark.start <= max(0, offset) or mark.start < end for mark in self._marks)
        if reached <= self._marks_sent:
            return None
        self._marks_sent = reached
        return self._marks[reached - 1]

    @property
    def _end(self) -> int:
        """The offset after the last token that can be sent."""
        return self.length if self._details is None else self._details.end

    def _row_tokens_max(self) -> int:
        if self._details is None or not self._details.token_bytes:
            return ROW_IDS_MAX
        return min(ROW_IDS_MAX, max(1, ROW_DETAILS_BYTES_MAX // self._details.token_bytes))


class HeldRequest:
    """A request from its admission until its owner no longer lists it.

    Its prompt is not here: the batching loop has it, and nobody is ever sent it.

    Attributes:
        steps: Its detokenizer reads `TokenStep`.
        due_ms: Its deadline, by our clock; `deadline_unix_ms` is by its owner's.
        started: A step has computed something of it.
        tokens_max: Of its prompt and the longest answer to it.
        returned: It was given back: the leader is told of it until it takes it, and runs it under
            another attempt.
    """

    def __init__(self, admit: Admit, keys: Sequence[ChoiceKey], now_ms: int, due_ms: int) -> None:
        self.request_id = admit.request_id
        self.owner = admit.owner
        self.attempt = admit.attempt
        self.detokenizer = admit.detokenizer
        self.steps = admit.steps
        self.deadline_unix_ms = admit.deadline_unix_ms
        self.due_ms = due_ms
        self.admitted_ms = now_ms
        self.cached_tokens = 0
        self.listed_after_end = False
        self.started = False
        self.requeued = False
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
        """Whether any choice goes on."""
        return any(choice.live for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(choice.length for choice in self.choices)

    def rewind(self, offsets: dict[int, int]) -> None:
        """Send again from these offsets on, a choice; from its beginning where none is given."""
        self._introduced = False
        for choice in self.choices:
            choice.rewind(offsets.get(choice.index, self._details_from or 0))

    def repeat_end(self) -> None:
        """Send again how each choice ended, without its ids."""
        self.rewind({choice.index: choice.length for choice in self.choices})

    def unsent(self) -> list[TokenRow]:
        """Take the rows that were not sent yet; the first ever says what the request is."""
        rows: list[TokenRow] = []
        for choice in self.choices:
            plain = choice.take_plain() if self._introduced else None
            if plain is None:
                rows.extend(self._rows(choice))
                continue
            offset, ids = plain
            row = TokenRow(
                request_id=self.request_id,
                choice=choice.index,
                attempt=self.attempt,
                offset=offset,
                token_ids=ids,
            )
            rows.append(row)
        return rows

    def _rows(self, choice: HeldChoice) -> Iterator[TokenRow]:
        for piece in choice.unsent():
            mark, finish = piece.origin, piece.finish
            yield TokenRow(
                request_id=self.request_id,
                choice=choice.index,
                attempt=self.attempt,
                offset=piece.offset,
                token_ids=piece.ids,
                details=piece.details,
                stream=None if self._introduced else self._stream(),
                weights=mark.weights if mark else None,
                retractions=mark.retractions if mark else 0,
                finish_reason=finish.reason if finish else None,
                matched_stop=finish.matched_stop if finish else None,
                error=finish.error if finish else None,
            )
            self._introduced = True

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
