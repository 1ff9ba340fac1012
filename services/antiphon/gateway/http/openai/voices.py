"""How OpenAI clients hear an answer: as a chat or as a text completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.errors import envelope
from antiphon.gateway.http.openai.logprobs import (
    NOTHING_BEFORE,
    chat_logprobs,
    text_logprobs,
)
from antiphon.gateway.http.openai.replies import (
    UNSET,
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatReply,
    Delta,
    Metadata,
    NoDelta,
    TextChoice,
    TextChunk,
    TextReply,
    UnsetType,
    UsageBody,
    usage_body,
)
from antiphon.gateway.http.sse import DONE, event
from antiphon.gateway.http.voice import Voice, total
from antiphon.gateway.owner.actions import Finished, Said
from antiphon.wire.base import Usage
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.gateway.chorus import Answer, Spoken
    from antiphon.gateway.http.openai.logprobs import TextLogprobs
    from antiphon.gateway.http.openai.reading import Telling
    from antiphon.gateway.stream import Stream
    from antiphon.wire.details import DetailPiece
    from antiphon.wire.errors import EngineError


class Header(msgspec.Struct, frozen=True):
    """What stands on every object of an answer."""

    id: str
    created: int
    model: str
    weight_version: str


class Echo(msgspec.Struct, frozen=True):
    """A prompt that its answers begin with, and the text of its first token."""

    text: str = ""
    first: str = ""


class _Voice(Voice):
    """What the two have in common. Choices are numbered through all prompts."""

    def __init__(
        self, header: Header, streams: Sequence[Stream], telling: Telling, *, cached: bool
    ) -> None:
        self._header = header
        self._telling = telling
        self._cached = cached
        self._usages = [Usage() for _ in streams]
        self._prompt_ids = [
            list(unpack_ids(stream.submit.prompt_ids)) if telling.prompt_ids else UNSET
            for stream in streams
        ]
        self._unsaid = set(range(telling.choices * len(streams)))

    def failure(self, error: EngineError) -> bytes:
        return event(msgspec.json.encode(envelope(error))) + DONE

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._telling.choices + choice

    def _usage(self, usages: Sequence[Usage]) -> UsageBody:
        return usage_body(total(usages), cached=self._cached)

    def _usage_so_far(self, prompt: int, said: Said | None) -> UsageBody | None:
        if not self._telling.usage_always or said is None or said.usage is None:
            return None
        self._usages[prompt] = said.usage
        return self._usage(self._usages)

    def _prompt_once(self, prompt: int, choice: int) -> list[int] | UnsetType:
        """The ids of a prompt, on the first chunk of each of its choices."""
        index = self._index(prompt, choice)
        if index not in self._unsaid:
            return UNSET
        self._unsaid.discard(index)
        return self._prompt_ids[prompt]

    def _states(self, piece: DetailPiece | None) -> list[list[float]] | UnsetType:
        if not self._telling.hidden or piece is None:
            return UNSET
        return [list(token.hidden) for token in piece.details.each()]

    def _ids(self, piece: DetailPiece | None) -> list[int] | UnsetType:
        """Those of the answer; tokens of the prompt lie before."""
        if not self._telling.ids or piece is None:
            return UNSET
        ids = unpack_ids(piece.details.token_ids)
        return [token for token in ids[max(0, -piece.offset) :] if token >= 0]


class ChatVoice(_Voice):
    """POST /v1/chat/completions."""

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """One object with all choices."""
        (answer,) = answers
        reply = ChatReply(
            id=self._header.id,
            created=self._header.created,
            model=self._header.model,
            choices=[self._choice(index, one) for index, one in enumerate(answer.choices)],
            usage=self._usage([answer.usage]),
            metadata=Metadata(self._header.weight_version),
        )
        return msgspec.json.encode(reply)

    def begin(self) -> bytes:
        """The role comes first and alone, of each choice."""
        delta = Delta(role="assistant", content="")
        return b"".join(
            self._event(
                ChatChunkChoice(
                    index=index, delta=delta, prompt_token_ids=self._prompt_once(0, index)
                )
            )
            for index in range(self._telling.choices)
        )

    def chunks(self, prompt: int, events: Sequence[Said | Finished]) -> bytes:
        """A chunk for each text, and one without any for the end of a choice."""
        return b"".join(map(self._chunk, events))

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The tokens of it all if they were asked for, and the mark of the end."""
        return (self._event(usage=self._usage(usages)) if self._telling.usage_last else b"") + DONE

    def _choice(self, index: int, spoken: Spoken) -> ChatChoice:
        details = spoken.details
        return ChatChoice(
            index=index,
            message=AnswerMessage(content=spoken.text),
            logprobs=chat_logprobs(details) if self._telling.logprobs else None,
            finish_reason=spoken.end.reason,
            matched_stop=spoken.end.matched_stop,
            hidden_states=self._states(details),
            prompt_token_ids=self._prompt_ids[0],
            response_token_ids=self._ids(details),
        )

    def _chunk(self, said: Said | Finished) -> bytes:
        if isinstance(said, Said):
            choice = ChatChunkChoice(
                index=said.choice,
                delta=Delta(content=said.text),
                logprobs=chat_logprobs(said.details) if self._telling.logprobs else None,
                hidden_states=self._states(said.details),
                response_token_ids=self._ids(said.details),
            )
            return self._event(choice, usage=self._usage_so_far(0, said))
        return self._event(
            ChatChunkChoice(
                index=said.choice,
                delta=NoDelta(),
                finish_reason=said.reason,
                matched_stop=said.matched_stop,
            )
        )

    def _event(self, *choices: ChatChunkChoice, usage: UsageBody | None = None) -> bytes:
        chunk = ChatChunk(
            id=self._header.id,
            created=self._header.created,
            model=self._header.model,
            choices=list(choices),
            usage=usage,
        )
        return event(msgspec.json.encode(chunk))


class CompletionVoice(_Voice):
    """POST /v1/completions."""

    def __init__(
        self,
        header: Header,
        streams: Sequence[Stream],
        telling: Telling,
        *,
        cached: bool,
        echoes: Sequence[Echo],
    ) -> None:
        super().__init__(header, streams, telling, cached=cached)
        self._echoes = echoes
        self._characters = [0] * (telling.choices * len(streams))
        self._begun: set[int] = set()

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """One object with the choices of every prompt, the best of each where more were made."""
        reply = TextReply(
            id=self._header.id,
            created=self._header.created,
            model=self._header.model,
            choices=[
                self._choice(prompt, number, spoken)
                for prompt, answer in enumerate(answers)
                for number, spoken in enumerate(best(answer.choices, self._telling.choices))
            ],
            usage=self._usage([answer.usage for answer in answers]),
            metadata=Metadata(self._header.weight_version),
        )
        return msgspec.json.encode(reply)

    def begin(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def chunks(self, prompt: int, events: Sequence[Said | Finished]) -> bytes:
        """A chunk for each text; the last one of a choice carries its end."""
        return b"".join(
            self._event(
                self._piece(prompt, choice, said, finished),
                usage=self._usage_so_far(prompt, said),
            )
            for choice, said, finished in _paired(events)
        )

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The tokens of it all if they were asked for, and the mark of the end."""
        return (self._event(usage=self._usage(usages)) if self._telling.usage_last else b"") + DONE

    def _piece(
        self, prompt: int, choice: int, said: Said | None, finished: Finished | None
    ) -> TextChoice:
        index = self._index(prompt, choice)
        echo = self._echoes[prompt] if index not in self._begun else Echo()
        self._begun.add(index)
        details = said.details if said else None
        return TextChoice(
            index=index,
            text=echo.text + (said.text if said else ""),
            logprobs=self._logprobs(index, details, echo),
            finish_reason=finished.reason if finished else None,
            matched_stop=finished.matched_stop if finished else None,
            hidden_states=self._states(details),
            prompt_token_ids=self._prompt_once(prompt, choice),
            response_token_ids=self._ids(details),
        )

    def _logprobs(self, index: int, details: DetailPiece | None, echo: Echo) -> TextLogprobs | None:
        if not self._telling.logprobs:
            return None
        before = NOTHING_BEFORE if not echo.first else (echo.first,)
        logprobs = text_logprobs(details, self._characters[index], before)
        if logprobs is not None:
            self._characters[index] += sum(map(len, logprobs.tokens))
        return logprobs

    def _choice(self, prompt: int, number: int, spoken: Spoken) -> TextChoice:
        details, echo = spoken.details, self._echoes[prompt]
        index = self._index(prompt, number)
        return TextChoice(
            index=index,
            text=echo.text + spoken.text,
            logprobs=self._logprobs(index, details, echo),
            finish_reason=spoken.end.reason,
            matched_stop=spoken.end.matched_stop,
            hidden_states=self._states(details),
            prompt_token_ids=self._prompt_ids[prompt],
            response_token_ids=self._ids(details),
        )

    def _event(self, *choices: TextChoice, usage: UsageBody | None = None) -> bytes:
        chunk = TextChunk(
            id=self._header.id,
            created=self._header.created,
            model=self._header.model,
            choices=list(choices),
            usage=usage,
        )
        return event(msgspec.json.encode(chunk))


def best(choices: Sequence[Spoken], count: int) -> Sequence[Spoken]:
    """The choices with the highest mean log-probability of a token, the likeliest first."""
    if len(choices) == count:
        return choices
    return sorted(choices, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(spoken: Spoken) -> float:
    piece = spoken.details
    logprobs = (
        [
            token.logprob
            for offset, token in enumerate(piece.details.each(), piece.offset)
            if offset >= 0 and token.logprob is not None
        ]
        if piece is not None
        else []
    )
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _paired(
    events: Sequence[Said | Finished],
) -> Iterator[tuple[int, Said | None, Finished | None]]:
    """Put the end of a choice beside the text right before it."""
    last: Said | None = None
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
