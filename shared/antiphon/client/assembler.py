"""Text and token outputs of a request, ordered by choice and offset. See docs/nats-client.md."""

from __future__ import annotations

import msgspec

from antiphon.wire.generate import GenerateText, TextCursor


class TextAssembler:
    """Accepts text in any order, with repeats, and returns each byte once and in order. Pure.

    The same holds for token outputs, from the offset `details_from` on.
    """

    def __init__(self, details_from: int = 0) -> None:
        self._details_from = details_from
        self._bytes: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    @property
    def cursors(self) -> tuple[TextCursor, ...]:
        """How much of each choice was returned."""
        return tuple(
            TextCursor(choice=choice, text_offset=length, token_offset=self.token_offset(choice))
            for choice, length in self._bytes.items()
        )

    def text_offset(self, choice: int) -> int:
        """Return how many bytes of a choice were returned."""
        return self._bytes.get(choice, 0)

    def token_offset(self, choice: int) -> int:
        """Return the offset up to which token outputs of a choice were returned."""
        return self._tokens.get(choice, self._details_from)

    def add(self, piece: GenerateText) -> GenerateText | None:
        """Return the new part of a piece, possibly empty; None if there is a gap before it."""
        text_offset, token_offset = self.text_offset(piece.choice), self.token_offset(piece.choice)
        details = piece.details
        if piece.text_offset > text_offset:
            return None
        if details is not None and details.offset > token_offset:
            return None
        new = piece.text.encode()[text_offset - piece.text_offset :]
        try:
            text = new.decode()
        except UnicodeDecodeError:
            return None  # the offset splits a character: not a continuation of the text so far
        self._bytes[piece.choice] = text_offset + len(new)
        if details is not None:
            details = details.beyond(token_offset) if details.end > token_offset else None
        if details is not None:
            self._tokens[piece.choice] = details.end
        return msgspec.structs.replace(piece, text_offset=text_offset, text=text, details=details)
