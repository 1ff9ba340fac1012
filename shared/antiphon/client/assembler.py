"""Text and details of one request, placed by choice and offset. Pure; see docs/nats-client.md."""

from __future__ import annotations

import msgspec

from antiphon.wire.generate import GenerateText, TextCursor


class TextAssembler:
    """Takes text in whatever order and as often as it comes; gives each byte out once, in order.

    So it does with the details of each token, from the offset `details_from` on.
    """

    def __init__(self, details_from: int = 0) -> None:
        self._details_from = details_from
        self._bytes: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    @property
    def cursors(self) -> tuple[TextCursor, ...]:
        """How much of each choice has been given out."""
        return tuple(
            TextCursor(choice=choice, text_offset=length, token_offset=self.token_offset(choice))
            for choice, length in self._bytes.items()
        )

    def text_offset(self, choice: int) -> int:
        """Return how many bytes of a choice have been given out."""
        return self._bytes.get(choice, 0)

    def token_offset(self, choice: int) -> int:
        """Return the token offset up to which details of a choice have been given out."""
        return self._tokens.get(choice, self._details_from)

    def add(self, piece: GenerateText) -> GenerateText | None:
        """Return what is new of a piece, perhaps nothing; None if what lies before is missing."""
        have, told = self.text_offset(piece.choice), self.token_offset(piece.choice)
        details = piece.details
        if piece.text_offset > have or (details is not None and details.offset > told):
            return None
        new = piece.text.encode()[have - piece.text_offset :]
        try:
            text = new.decode()
        except UnicodeDecodeError:
            return None  # it does not join what was given out: whatever it is, it is not the answer
        self._bytes[piece.choice] = have + len(new)
        if details is not None:
            details = details.beyond(told) if details.end > told else None
        if details is not None:
            self._tokens[piece.choice] = details.end
        return msgspec.structs.replace(piece, text_offset=have, text=text, details=details)
