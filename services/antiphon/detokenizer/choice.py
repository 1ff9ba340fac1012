"""One choice of one request: its ids in, its text out, and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from antiphon.detokenizer.incremental import Decode, IncrementalDecoder
from antiphon.detokenizer.stop import Match, StopScanner
from antiphon.wire.base import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.errors import ErrorReply
    from antiphon.wire.sampling import StopStrings

PIECE_BYTES: Final = 64 * 1024
"""Longest piece of text in one row: a whole answer may be larger than a message."""


@dataclass(frozen=True, slots=True)
class End:
    """How a choice ended."""

    finish_reason: FinishReason
    matched_stop: str | int | None = None
    error: ErrorReply | None = None


class Choice:
    """The place where it is fixed which token is at which offset.

    Attributes:
        offset: The next offset that is accepted; also the number of tokens that count.
        end: Set once; no token is accepted after it.
    """

    def __init__(self, decode: Decode, stop: StopStrings) -> None:
        self.offset = 0
        self.end: End | None = None
        self._decoder = IncrementalDecoder(decode, stop.skip_special_tokens)
        self._scanner = StopScanner(stop.strings, stop.include)
        self._text = bytearray()

    @property
    def text_bytes(self) -> int:
        """Length of the text shown so far, in UTF-8 bytes."""
        return len(self._text)

    def push(self, token_id: int) -> None:
        """Accept the id at `offset`. It may complete a stop string and end the choice."""
        assert self.end is None, "a token after the end of its choice"
        self.offset += 1
        self._show(self._decoder.push(token_id))

    def finish(self, end: End) -> None:
        """End the choice as the worker says, unless a stop string hides in what was held back."""
        if self.end is None:
            self._show(self._decoder.flush())
        if self.end is None:
            self._text += self._scanner.flush().encode()
            self.end = end

    def begins_at(self, text_offset: int) -> bool:
        """Whether text may go on at a byte offset: neither beyond ours, nor inside a character."""
        return text_offset <= len(self._text) and self._border(text_offset) == text_offset

    def pieces(self, text_offset: int) -> Iterator[tuple[int, str]]:
        """Yield the text beyond a byte offset as (offset, text); one piece at least, if empty."""
        while True:
            end = self._border(text_offset + PIECE_BYTES)
            yield text_offset, self._text[text_offset:end].decode()
            if end == len(self._text):
                return
            text_offset = end

    def _show(self, text: str) -> None:
        shown = self._scanner.push(text)
        if isinstance(shown, Match):
            self.end = End(FinishReason.STOP, matched_stop=shown.stop)
            shown = shown.text
        self._text += shown.encode()

    def _border(self, text_offset: int) -> int:
        """The last place up to a byte offset at which a character begins, or the text ends."""
        if text_offset >= len(self._text):
            return len(self._text)
        while self._text[text_offset] & 0xC0 == 0x80:  # the rest of a character, in UTF-8
            text_offset -= 1
        return text_offset
