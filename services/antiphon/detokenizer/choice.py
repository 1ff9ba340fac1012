"""State of one choice of one request: token ids in, text out, and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from antiphon.detokenizer.incremental import Decode, IncrementalDecoder
from antiphon.detokenizer.stop import StopMatch, StopScanner
from antiphon.detokenizer.thinking import ThinkingCounter
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import id_count
from antiphon.wire.text import Origin
from antiphon.wire.token_outputs import TokenOutputsBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.wire.errors import ErrorReply
    from antiphon.wire.ids import InstanceId
    from antiphon.wire.sampling import StopStrings
    from antiphon.wire.token_outputs import TokenOutputs
    from antiphon.wire.tokens import TokenRow

PIECE_BYTES: Final = 64 * 1024
"""Maximum text, and maximum token outputs, in one row: an answer may be larger than a message."""


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """How a choice ended."""

    finish_reason: FinishReason
    matched_stop: str | int | None = None
    error: ErrorReply | None = None


class ChoiceState:
    """Fixes which token is at which offset.

    Attributes:
        first: The first offset: 0, or less if prompt tokens are included in the token outputs.
        offset: The next offset that is accepted.
        emitted: The offset up to which the text of every token has been emitted.
        tokens: Number of accepted output tokens.
        origins: Where its tokens come from, in their order.
        end: Set once; no token is accepted after it.
    """

    def __init__(self, decode: Decode, stop: StopStrings, first: int = 0) -> None:
        self.first = self.offset = self.emitted = first
        self.tokens = 0
        self.origins: tuple[Origin, ...] = ()
        self.end: ChoiceResult | None = None
        self._details = TokenOutputsBuffer(first)
        self._decoder = IncrementalDecoder(decode, stop.skip_special_tokens)
        self._scanner = StopScanner(stop.strings, stop.include, stop.patterns)
        self._thinking = None if stop.thinking is None else ThinkingCounter(stop.thinking)
        self._text = bytearray()

    @property
    def text_bytes(self) -> int:
        """Length of the emitted text, in UTF-8 bytes."""
        return len(self._text)

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens, where they are counted."""
        return 0 if self._thinking is None else self._thinking.tokens

    def accept(self, offset: int, token_ids: Sequence[int], details: TokenOutputs | None) -> None:
        """Accept the new tokens of a row that begins at `offset`, at most the next offset.

        A token may complete a stop string and end the choice; later tokens do not count.
        """
        known = self.offset - offset
        for token_id in token_ids[known:]:
            self.push(token_id)
            if self.end is not None:
                break
        if details is not None and known < details.count:
            self._details.append(details.drop_first(known))
            if self.end is not None:
                self._details.truncate(self.offset)
            self.offset = self._details.end
        self._update_emitted()

    def record_origin(self, worker: InstanceId, row: TokenRow) -> None:
        """Record where the tokens of a row come from, before they are accepted.

        A row without an origin continues that of the row before it; the origin of a row without new
        tokens is about earlier tokens.
        """
        if row.weights is None or (
            self.origins and row.offset + id_count(row.token_ids) <= self.tokens
        ):
            return
        origin = Origin(
            start=self.tokens, worker=worker, weights=row.weights, retractions=row.retractions
        )
        before = tuple(each for each in self.origins if each.start < self.tokens)
        if not before:  # the origin of earlier tokens, if any, is not known any more
            self.origins = (msgspec.structs.replace(origin, start=0),)
        elif before[-1] != msgspec.structs.replace(origin, start=before[-1].start):
            self.origins = (*before, origin)

    def push(self, token_id: int) -> None:
        """Accept the token at `offset`. It may complete a stop string and end the choice."""
        assert self.end is None, "a token after the end of its choice"
        self.offset += 1
        self.tokens += 1
        self._emit(self._decoder.push(token_id))

    def finish(self, end: ChoiceResult) -> None:
        """End the choice as the worker reports, unless the held-back text contains a stop."""
        if self.end is None:
            self._emit(self._decoder.flush())
        if self.end is None:
            self._text += self._scanner.flush().encode()
            self.end = end
        self._update_emitted()

    def can_resume_at(self, text_offset: int, token_offset: int) -> bool:
        """Whether it can be sent from these offsets: within the text, not inside a character."""
        inside = text_offset <= len(self._text) and self.first <= token_offset <= self.emitted
        return inside and self._border(text_offset) == text_offset

    def text_chunks(self, text_offset: int) -> Iterator[tuple[int, str]]:
        """Yield the text beyond a byte offset as (offset, text); at least one, perhaps empty."""
        while True:
            end = self._border(text_offset + PIECE_BYTES)
            yield text_offset, self._text[text_offset:end].decode()
            if end == len(self._text):
                return
            text_offset = end

    def token_output_chunks(self, token_offset: int) -> Iterator[tuple[int, TokenOutputs]]:
        """Yield token outputs from an offset on as (offset, outputs); at least one, perhaps empty.

        They go as far as the text does.
        """
        step = max(1, PIECE_BYTES // max(1, self._details.token_bytes))
        while True:
            end = min(self.emitted, token_offset + step)
            yield token_offset, self._details.read(token_offset, end)
            if end == self.emitted:
                return
            token_offset = end

    def _update_emitted(self) -> None:
        if self.end is not None and self._thinking is not None:
            self._thinking.end(self.tokens)
        if self.end is not None or not (self._decoder.has_pending or self._scanner.has_pending):
            self.emitted = self.offset

    def _emit(self, text: str) -> None:
        if self._thinking is not None:
            self._thinking.push(text, self.tokens)
        shown = self._scanner.push(text)
        if isinstance(shown, StopMatch):
            self.end = ChoiceResult(FinishReason.STOP, matched_stop=shown.stop)
            shown = shown.text
        self._text += shown.encode()

    def _border(self, text_offset: int) -> int:
        """The last offset up to `text_offset` where a character begins or the text ends."""
        if text_offset >= len(self._text):
            return len(self._text)
        while self._text[text_offset] & 0xC0 == 0x80:  # a continuation byte in UTF-8
            text_offset -= 1
        return text_offset
