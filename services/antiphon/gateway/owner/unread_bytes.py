"""What one request has said and its client has not taken yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.gateway.owner.actions import TextDelta


class UnreadBytes:
    """Bytes of text and details. Pure.

    Text comes as fast as it is generated, so whoever lets more than the bound wait does not read.
    Details of the prompt come at once, and no reader is that fast: for them it has some seconds,
    and some more as long as it goes on taking.

    Attributes:
        size_bytes: All that waits.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._prompt_bytes = 0
        self._taken_bytes = 0

    @property
    def answer_bytes(self) -> int:
        """What waits beside details of the prompt."""
        return self.size_bytes - self._prompt_bytes

    @property
    def has_prompt(self) -> bool:
        """Whether details of the prompt wait."""
        return self._prompt_bytes > 0

    def put(self, said: TextDelta) -> None:
        """Count what is given to the client's stream."""
        self.size_bytes += said.size_bytes
        if said.details is not None and said.details.offset < 0:
            self._prompt_bytes += said.size_bytes

    def take(self, size_bytes: int) -> None:
        """The client has taken so much, and the prompt comes first."""
        self.size_bytes -= size_bytes
        self._prompt_bytes = max(0, self._prompt_bytes - size_bytes)
        self._taken_bytes += size_bytes

    def is_stalled(self, bytes_max: int) -> bool:
        """Whether more than the bound waits, and no more than that was taken since last asked."""
        taken, self._taken_bytes = self._taken_bytes, 0
        return self.size_bytes > bytes_max and taken <= bytes_max
