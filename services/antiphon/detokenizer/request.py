"""A request in the detokenizer: its attempt, its choices, and its gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.base import Attempt, FinishReason, Process, Usage
from antiphon.wire.text import TextRow
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.detokenizer.choice import ChoiceState
    from antiphon.detokenizer.incremental import TokenTexts
    from antiphon.wire.errors import ErrorReply
    from antiphon.wire.ids import RequestId
    from antiphon.wire.text import Origin
    from antiphon.wire.tokens import TokenStream


@dataclass(slots=True)
class DetokenizerRequest:
    """A live request, or one that has ended and is not forgotten yet.

    Attributes:
        tokens: Texts of single tokens, for logprobs.
        listed_at: When the gateway's open list last named it, or when it began.
        stopped_at: When a stop was last sent to the worker, by choice.
        origins_sent: How many origins were sent to the gateway, by choice.
        error: The error that ended the whole request, after a failure here.
    """

    request_id: RequestId
    stream: TokenStream
    attempt: Attempt
    worker: Process
    choices: dict[int, ChoiceState]
    tokens: TokenTexts
    listed_at: float
    stopped_at: dict[int, float] = field(default_factory=dict[int, float])
    origins_sent: dict[int, int] = field(default_factory=dict[int, int])
    error: ErrorReply | None = None

    @property
    def owner(self) -> Process:
        return self.stream.owner

    @property
    def ended(self) -> bool:
        if self.error is not None:
            return True
        return all(choice.end is not None for choice in self.choices.values())

    @property
    def usage(self) -> Usage:
        completion_tokens = reasoning_tokens = 0
        for choice in self.choices.values():
            completion_tokens += choice.tokens
            reasoning_tokens += choice.reasoning_tokens
        return Usage(
            prompt_tokens=self.stream.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=self.stream.cached_tokens,
            reasoning_tokens=reasoning_tokens,
        )

    def rows(self, index: int, text_start: int, token_start: int) -> Iterator[TextRow]:
        """Yield text and token outputs from these offsets; the last row has the end, if any."""
        if self.error is not None:
            yield TextRow(
                request_id=self.request_id,
                choice=index,
                attempt=self.attempt,
                continues=self.stream.continues,
                text_offset=0,
                finish_reason=FinishReason.ERROR,
                error=self.error,
            )
            return
        choice = self.choices[index]
        texts = list(choice.text_chunks(text_start))
        pieces = self._detail_pieces(choice, token_start)
        texts += [(choice.text_bytes, "")] * (len(pieces) - len(texts))
        # Each row names the end of the outputs, so that a gateway that has the last row sees a gap.
        if pieces:
            rest = TokenOutputsChunk(offset=choice.emitted, details=TokenOutputs())
            pieces += [rest] * (len(texts) - len(pieces))
        for number, (text_offset, text) in enumerate(texts):
            end = choice.end if number == len(texts) - 1 else None
            yield TextRow(
                request_id=self.request_id,
                choice=index,
                attempt=self.attempt,
                continues=self.stream.continues,
                text_offset=text_offset,
                text=text,
                details=pieces[number] if pieces else None,
                finish_reason=end.finish_reason if end else None,
                matched_stop=end.matched_stop if end else None,
                usage=self.usage,
                origins=self._origins(index, choice),
                error=end.error if end else None,
            )

    def _origins(self, index: int, choice: ChoiceState) -> tuple[Origin, ...]:
        """The origins, if there is a new one, or the choice has ended."""
        origins = choice.origins
        if self.origins_sent.get(index) == len(origins) and choice.end is None:
            return ()
        self.origins_sent[index] = len(origins)
        return origins

    def _detail_pieces(self, choice: ChoiceState, token_start: int) -> list[TokenOutputsChunk]:
        if self.stream.details_from is None:
            return []
        return [
            self._detail_piece(offset, details)
            for offset, details in choice.token_output_chunks(token_start)
        ]

    def _detail_piece(self, offset: int, details: TokenOutputs) -> TokenOutputsChunk:
        stop = self.stream.stop
        if not stop.token_texts:
            return TokenOutputsChunk(offset=offset, details=details)
        ids = sorted(details.ids())
        return TokenOutputsChunk(
            offset=offset,
            details=details,
            texts=self.tokens.texts(ids),
            written=self.tokens.token_bytes(ids, skips_special=stop.skip_special_tokens),
        )
