"""Output of one request that its client has not read yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.gateway.owner.actions import TextDelta


class UnreadBytes:
    """Bytes of text and token outputs. Pure.

    Text arrives as it is generated, so a client with more than the limit unread is not reading.
    Token outputs of a prompt arrive at once, faster than any client reads: for them it has some
    seconds, extended as long as it keeps reading.

    Attributes:
        size_bytes: All unread bytes.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._prompt_bytes = 0
        self._taken_bytes = 0

    @property
    def answer_bytes(self) -> int:
        """Unread bytes other than token outputs of the prompt."""
        return self.size_bytes - self._prompt_bytes

    @property
    def has_prompt(self) -> bool:
        """Whether token outputs of the prompt are unread."""
        return self._prompt_bytes > 0

    def put(self, delta: TextDelta) -> None:
        """Count an event given to the client's stream."""
        self.size_bytes += delta.size_bytes
        if delta.details is not None and delta.details.offset < 0:
            self._prompt_bytes += delta.size_bytes

    def take(self, size_bytes: int) -> None:
        """The client has read this many bytes, those of the prompt first."""
        self.size_bytes -= size_bytes
        self._prompt_bytes = max(0, self._prompt_bytes - size_bytes)
        self._taken_bytes += size_bytes

    def is_stalled(self, bytes_max: int) -> bool:
        """Whether more than the limit is unread and no more than it was read since last checked."""
        taken, self._taken_bytes = self._taken_bytes, 0
        return self.size_bytes > bytes_max and taken <= bytes_max
