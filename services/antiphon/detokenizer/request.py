"""One request as the detokenizer holds it: its attempt, its choices, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.base import Attempt, Process, Usage
from antiphon.wire.text import TextRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.detokenizer.choice import Choice
    from antiphon.wire.ids import RequestId
    from antiphon.wire.tokens import TokenStream


@dataclass(slots=True)
class Request:
    """A live request, or one that has ended and is not forgotten yet.

    Attributes:
        listed_at: When the owner's open list last named it, or when it began.
        stopped_at: When the worker was last told to stop, a choice.
    """

    id: RequestId
    stream: TokenStream
    attempt: Attempt
    worker: Process
    choices: dict[int, Choice]
    listed_at: float
    stopped_at: dict[int, float] = field(default_factory=dict[int, float])

    @property
    def owner(self) -> Process:
        """The gateway that reads the text."""
        return self.stream.owner

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.end is not None for choice in self.choices.values())

    @property
    def usage(self) -> Usage:
        """Tokens that count, up to the ends found here."""
        return Usage(
            prompt_tokens=self.stream.prompt_tokens,
            completion_tokens=sum(choice.offset for choice in self.choices.values()),
            cached_tokens=self.stream.cached_tokens,
        )

    def rows(self, index: int, start: int) -> Iterator[TextRow]:
        """Say a choice's text from a byte offset on; the last row has its end if it has one."""
        choice = self.choices[index]
        for text_offset, text in choice.pieces(start):
            is_last = text_offset + len(text.encode()) == choice.text_bytes
            end = choice.end if is_last else None
            yield TextRow(
                request_id=self.id,
                choice=index,
                attempt=self.attempt,
                continues=self.stream.continues,
                text_offset=text_offset,
                text=text,
                finish_reason=end.finish_reason if end else None,
                matched_stop=end.matched_stop if end else None,
                usage=self.usage,
                error=end.error if end else None,
            )
