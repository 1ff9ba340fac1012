"""Writer of text completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.logprobs import NOTHING_BEFORE, TextLogprobs, text_logprobs
from antiphon.gateway.http.openai.schema import (
    UNSET,
    TextChoice,
    TextReply,
)
from antiphon.gateway.http.openai.write import CompletionHeader, OpenAiResponseWriter
from antiphon.gateway.owner.actions import Finished, TextDelta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.gateway.http.core.meta_info import GenerateOutputs
    from antiphon.gateway.http.openai.parse import OpenAiResponseOptions
    from antiphon.gateway.stream.stream import CollectedChoice, CollectedResponse, RequestStream
    from antiphon.wire.token_outputs import TokenOutputsChunk


class PromptEcho(msgspec.Struct, frozen=True):
    """A prompt to echo, and the text of its first token."""

    text: str = ""
    first: str = ""


class CompletionResponseWriter(OpenAiResponseWriter):
    CHUNK = "text_completion"

    def __init__(
        self,
        header: CompletionHeader,
        streams: Sequence[RequestStream],
        options: OpenAiResponseOptions,
        *,
        cached: bool,
        echoes: Sequence[PromptEcho],
        record: GenerateOutputs | None = None,
    ) -> None:
        super().__init__(header, streams, options, cached=cached, record=record)
        self._echoes = echoes
        self._characters = [0] * (options.n * len(streams))
        self._begun: set[int] = set()

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        """Return one object with the choices of every prompt, or the best ones."""
        if self._record is not None:
            self._record.add_all(answers)
        choices = [
            self._choice(prompt, number, collected)
            for prompt, answer in enumerate(answers)
            for number, collected in enumerate(best_of(answer.choices, self._options.n))
        ]
        reply = TextReply(choices=choices, **self._reply_fields(answers))
        return msgspec.json.encode(reply)

    def begin(self) -> bytes:
        return b""

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        """Return a chunk for each text; the last one of a choice has its finish reason."""
        self._record_events(prompt, events)
        if len(events) == 1 and self._bare and isinstance(only := events[0], TextDelta):
            index = self._index(prompt, only.choice)
            if index in self._begun:
                return self._text_event(index, only.text)
        return b"".join(
            self._event(
                self._piece(prompt, choice, only, finished),
                usage=self._usage_so_far(prompt, only),
            )
            + (self._states_event(self._index(prompt, choice)) if finished else b"")
            for choice, only, finished in _merge_finish(events)
        )

    def _states_event(self, index: int) -> bytes:
        states = self._take_hidden_states(index)
        if states is UNSET:
            return b""
        return self._event(TextChoice(index=index, text="", hidden_states=states))

    def _piece(
        self, prompt: int, choice: int, delta: TextDelta | None, finished: Finished | None
    ) -> TextChoice:
        index = self._index(prompt, choice)
        echo = self._echoes[prompt] if index not in self._begun else PromptEcho()
        self._begun.add(index)
        details = delta.details if delta else None
        self._collect_hidden_states(index, details)
        return TextChoice(
            index=index,
            text=echo.text + (delta.text if delta else ""),
            logprobs=self._logprobs(index, details, echo),
            finish_reason=finished.reason if finished else None,
            matched_stop=finished.matched_stop if finished else None,
            prompt_token_ids=self._prompt_ids_once(prompt, choice),
            response_token_ids=self._ids(details),
            meta_info=self._meta_info(index, prompt, finished) if finished else UNSET,
        )

    def _logprobs(
        self, index: int, details: TokenOutputsChunk | None, echo: PromptEcho
    ) -> TextLogprobs | None:
        if not self._options.logprobs:
            return None
        before = NOTHING_BEFORE if not echo.first else (echo.first,)
        logprobs = text_logprobs(details, self._characters[index], before)
        if logprobs is not None:
            self._characters[index] += sum(map(len, logprobs.tokens))
        return logprobs

    def _choice(self, prompt: int, number: int, collected: CollectedChoice) -> TextChoice:
        details, echo = collected.details, self._echoes[prompt]
        index = self._index(prompt, number)
        return TextChoice(
            index=index,
            text=echo.text + collected.text,
            logprobs=self._logprobs(index, details, echo),
            finish_reason=collected.end.reason,
            matched_stop=collected.end.matched_stop,
            hidden_states=self._hidden_states(details),
            prompt_token_ids=self._prompt_ids[prompt],
            response_token_ids=self._ids(details),
            meta_info=self._meta_info(index, prompt, collected.end),
        )

    def _text_choice(self, index: int, text: str) -> TextChoice:
        return TextChoice(index=index, text=text)


def best_of(choices: Sequence[CollectedChoice], count: int) -> Sequence[CollectedChoice]:
    """Return the choices with the highest mean logprob per token, the best first."""
    if len(choices) == count:
        return choices
    return sorted(choices, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(collected: CollectedChoice) -> float:
    piece = collected.details
    logprobs = (
        [
            token.logprob
            for offset, token in enumerate(piece.details.iter_tokens(), piece.offset)
            if offset >= 0 and token.logprob is not None
        ]
        if piece is not None
        else []
    )
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _merge_finish(
    events: Sequence[TextDelta | Finished],
) -> Iterator[tuple[int, TextDelta | None, Finished | None]]:
    """Merge the end of a choice into the text right before it."""
    last: TextDelta | None = None
    for each in events:
        if isinstance(each, Finished):
            together = last is not None and last.choice == each.choice
            if last is not None and not together:
                yield last.choice, last, None
            yield each.choice, last if together else None, each
            last = None
        else:
            if last is not None:
                yield last.choice, last, None
            last = each
    if last is not None:
        yield last.choice, last, None
