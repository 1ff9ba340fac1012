"""How OpenAI clients hear an answer: chat or text completion, whole or in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from antiphon.gateway.http.logprobs import (
    ChatLogprobs,
    TextLogprobs,
    chat_logprobs,
    text_logprobs,
)
from antiphon.gateway.http.sse import event
from antiphon.gateway.owner.actions import Finished, Said
from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.details import join_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from antiphon.wire.details import DetailPiece


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request. `prompt_tokens_details` comes with the cache report."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None = None
    reasoning_tokens: int = 0


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the assistant said."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: None = None
    tool_calls: None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """More of what the assistant says."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str
    reasoning_content: None = None


class NoDelta(msgspec.Struct, frozen=True):
    """Nothing more: the choice has ended."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A whole choice of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    matched_stop: str | int | None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a choice of a chat."""

    index: int
    delta: Delta | NoDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a text completion, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class Metadata(msgspec.Struct, frozen=True):
    """Which weights answered."""

    weight_version: str = "default"


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[msgspec.Struct]
    usage: UsageBody
    metadata: Metadata = Metadata()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[msgspec.Struct]
    usage: UsageBody | None = None


class Spoken(msgspec.Struct):
    """A choice of an answer that is told in one piece, as it grows."""

    said: list[Said]
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(said.text for said in self.said)

    @property
    def details(self) -> DetailPiece | None:
        """All that is told of its tokens."""
        return join_pieces(said.details for said in self.said)


class Voice(ABC):
    """Writes one request's answer. One a request: it holds the id and the date."""

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    """What the `object` of a whole answer and of a piece of one is."""

    def __init__(
        self, answer_id: str, created: int, model: str, *, choices: int, usage_always: bool
    ) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._choices = choices
        self._usage_always = usage_always

    @abstractmethod
    def begin(self) -> bytes:
        """The events before any text."""

    @abstractmethod
    def chunks(self, events: Iterable[Said | Finished]) -> bytes:
        """The events that tell more of the answer."""

    def whole(self, choices: list[Spoken], usage: Usage) -> bytes:
        """The body that tells all of the answer."""
        reply = Reply(
            id=self._id,
            object=self.WHOLE,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, one) for index, one in enumerate(choices)],
            usage=usage_body(usage),
        )
        return msgspec.json.encode(reply)

    def usage(self, usage: Usage) -> bytes:
        """The event that tells the tokens of all of it: a chunk without choices."""
        return self._event(usage=usage_body(usage))

    @abstractmethod
    def _choice(self, index: int, spoken: Spoken) -> msgspec.Struct:
        """One choice of a whole answer, which has ended well."""

    def _event(self, *choices: msgspec.Struct, usage: UsageBody | None = None) -> bytes:
        chunk = Chunk(
            id=self._id,
            object=self.CHUNK,
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=usage,
        )
        return event(msgspec.json.encode(chunk))

    def _usage_so_far(self, said: Said) -> UsageBody | None:
        return usage_body(said.usage) if self._usage_always and said.usage is not None else None


class ChatVoice(Voice):
    """POST /v1/chat/completions."""

    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def begin(self) -> bytes:
        """The role comes first and alone, of each choice."""
        delta = Delta(role="assistant", content="")
        return b"".join(
            self._event(ChatChunkChoice(index=index, delta=delta)) for index in range(self._choices)
        )

    def chunks(self, events: Iterable[Said | Finished]) -> bytes:
        """A chunk for each text, and one without any for the end of a choice."""
        return b"".join(map(self._chunk, events))

    def _choice(self, index: int, spoken: Spoken) -> ChatChoice:
        finished = _finish(spoken)
        return ChatChoice(
            index=index,
            message=AnswerMessage(content=spoken.text),
            logprobs=chat_logprobs(spoken.details),
            finish_reason=finished.reason,
            matched_stop=finished.matched_stop,
        )

    def _chunk(self, said: Said | Finished) -> bytes:
        if isinstance(said, Said):
            choice = ChatChunkChoice(
                index=said.choice,
                delta=Delta(content=said.text),
                logprobs=chat_logprobs(said.details),
            )
            return self._event(choice, usage=self._usage_so_far(said))
        return self._event(
            ChatChunkChoice(
                index=said.choice,
                delta=NoDelta(),
                finish_reason=said.reason,
                matched_stop=said.matched_stop,
            )
        )


class CompletionVoice(Voice):
    """POST /v1/completions."""

    WHOLE = CHUNK = "text_completion"

    def __init__(
        self, answer_id: str, created: int, model: str, *, choices: int, usage_always: bool
    ) -> None:
        super().__init__(answer_id, created, model, choices=choices, usage_always=usage_always)
        self._characters = [0] * choices

    def begin(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def chunks(self, events: Iterable[Said | Finished]) -> bytes:
        """A chunk for each text; the last one of a choice carries its end."""
        return b"".join(
            self._event(
                TextChoice(
                    index=index,
                    text=said.text if said else "",
                    logprobs=self._logprobs(said) if said else None,
                    finish_reason=finished.reason if finished else None,
                    matched_stop=finished.matched_stop if finished else None,
                ),
                usage=self._usage_so_far(said) if said else None,
            )
            for index, said, finished in _paired(events)
        )

    def _logprobs(self, said: Said) -> TextLogprobs | None:
        logprobs = text_logprobs(said.details, self._characters[said.choice])
        if logprobs is not None:
            self._characters[said.choice] += sum(map(len, logprobs.tokens))
        return logprobs

    def _choice(self, index: int, spoken: Spoken) -> TextChoice:
        finished = _finish(spoken)
        return TextChoice(
            index=index,
            text=spoken.text,
            logprobs=text_logprobs(spoken.details, 0),
            finish_reason=finished.reason,
            matched_stop=finished.matched_stop,
        )


def usage_body(usage: Usage) -> UsageBody:
    """Write the tokens as OpenAI does."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _finish(spoken: Spoken) -> Finished:
    assert spoken.finished is not None, "a request ends well when all its choices have ended"
    return spoken.finished


def _paired(
    events: Iterable[Said | Finished],
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
