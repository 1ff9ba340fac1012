"""What a client saw of one request, and nothing computed from it."""

from __future__ import annotations

import msgspec


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Text that arrived together.

    Attributes:
        tokens: Output tokens so far, if the server reports them with each piece.
    """

    at_s: float
    text: str
    tokens: int | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request, in seconds of one monotonic clock.

    Attributes:
        due_s: When the arrival process wanted it sent; `sent_s` is later where the client was slow.
        ended_s: When the stream had ended, the last event included.
        output_tokens: As the server reports them; else as requested.
        cached_tokens: Prompt tokens from the cache; None if the server does not report them.
        error: Why there is no answer. Such a request counts in nothing but `failed`.
    """

    due_s: float
    sent_s: float
    ended_s: float
    pieces: tuple[Piece, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)
