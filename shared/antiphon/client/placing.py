"""Text of one request, placed by choice and byte offset. Pure; see docs/nats-client.md."""

from __future__ import annotations

from antiphon.wire.generate import GenerateText, TextPlace


class Placing:
    """Takes text in whatever order and as often as it comes; gives each byte out once, in order."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    @property
    def places(self) -> tuple[TextPlace, ...]:
        """How much of each choice has been given out."""
        return tuple(TextPlace(choice=c, text_offset=n) for c, n in self._bytes.items())

    def have(self, choice: int) -> int:
        """Return how many bytes of a choice have been given out."""
        return self._bytes.get(choice, 0)

    def place(self, piece: GenerateText) -> str | None:
        """Return what is new of a piece, perhaps nothing; None if text before it is missing."""
        have = self.have(piece.choice)
        if piece.text_offset > have:
            return None
        new = piece.text.encode()[have - piece.text_offset :]
        self._bytes[piece.choice] = have + len(new)
        return new.decode()
