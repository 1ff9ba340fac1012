"""How OpenAI clients hear an answer: chat or text completion, whole or in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import msgspec

from antiphon.gateway.http.sse import event
from antiphon.gateway.owner.actions import Finished, Said
from antiphon.wire.base import FinishReason, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

C = TypeVar("C")


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
    logprobs: None = None
    finish_reason: FinishReason
    matched_stop: str | int | None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a choice of a chat."""

    index: int
    delta: Delta | NoDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a text completion, or a piece of one."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class Metadata(msgspec.Struct, frozen=True):
    """Which weights answered."""

    weight_version: str = "default"


class Reply(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: UsageBody
    metadata: Metadata = Metadata()


class Chunk(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """A piece of an answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: UsageBody | None = None


class Spoken(msgspec.Struct):
    """A choice of an answer that is told in one piece, as it grows."""

    text: list[str]
    finished: Finished | None = None


class Voice(ABC):
    """Writes one request's answer. One a request: it holds the id and the date."""

    def __init__(self, answer_id: str, created: int, model: str, *, usage_always: bool) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._usage_always = usage_always

    @abstractmethod
    def begin(self) -> bytes:
        """The events before any text."""

    @abstractmethod
    def chunks(self, events: Iterable[Said | Finished]) -> bytes:
        """The events that tell more of the answer."""

    @abstractmethod
    def whole(self, choices: list[Spoken], usage: Usage) -> bytes:
        """The body that tells all of the answer."""

    @abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """The event that tells the tokens of all of it."""

    def _usage_so_far(self, said: Said) -> UsageBody | None:
        return usage_body(said.usage) if self._usage_always and said.usage is not None else None


class ChatVoice(Voice):
    """POST /v1/chat/completions."""

    def begin(self) -> bytes:
        """The role comes first and alone."""
        return self._event(ChatChunkChoice(index=0, delta=Delta(role="assistant", content="")))

    def chunks(self, events: Iterable[Said | Finished]) -> bytes:
        """A chunk for each text, and one without any for the end of a choice."""
        return b"".join(map(self._chunk, events))

    def whole(self, choices: list[Spoken], usage: Usage) -> bytes:
        """Everything at once."""
        return msgspec.json.encode(
            Reply(
                id=self._id,
                object="chat.completion",
                created=self._created,
                model=self._model,
                choices=[
                    ChatChoice(
                        index=index,
                        message=AnswerMessage(content="".join(spoken.text)),
                        finish_reason=finished.reason,
                        matched_stop=finished.matched_stop,
                    )
                    for index, spoken, finished in _finished(choices)
                ],
                usage=usage_body(usage),
            )
        )

    def usage(self, usage: Usage) -> bytes:
        """A chunk without choices."""
        return self._event(usage=usage_body(usage))

    def _chunk(self, said: Said | Finished) -> bytes:
        if isinstance(said, Said):
            choice = ChatChunkChoice(index=said.choice, delta=Delta(content=said.text))
            return self._event(choice, usage=self._usage_so_far(said))
        return self._event(
            ChatChunkChoice(
                index=said.choice,
                delta=NoDelta(),
                finish_reason=said.reason,
                matched_stop=said.matched_stop,
            )
        )

    def _event(self, *choices: ChatChunkChoice, usage: UsageBody | None = None) -> bytes:
        chunk = Chunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=usage,
        )
        return event(msgspec.json.encode(chunk))


class CompletionVoice(Voice):
    """POST /v1/completions."""

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
                    finish_reason=finished.reason if finished else None,
                    matched_stop=finished.matched_stop if finished else None,
                ),
                usage=self._usage_so_far(said) if said else None,
            )
            for index, said, finished in _paired(events)
        )

    def whole(self, choices: list[Spoken], usage: Usage) -> bytes:
        """Everything at once."""
        return msgspec.json.encode(
            Reply(
                id=self._id,
                object="text_completion",
                created=self._created,
                model=self._model,
                choices=[
                    TextChoice(
                        index=index,
                        text="".join(spoken.text),
                        finish_reason=finished.reason,
                        matched_stop=finished.matched_stop,
                    )
                    for index, spoken, finished in _finished(choices)
                ],
                usage=usage_body(usage),
            )
        )

    def usage(self, usage: Usage) -> bytes:
        """A chunk without choices."""
        return self._event(usage=usage_body(usage))

    def _event(self, *choices: TextChoice, usage: UsageBody | None = None) -> bytes:
        chunk = Chunk(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=usage,
        )
        return event(msgspec.json.encode(chunk))


def usage_body(usage: Usage) -> UsageBody:
    """Write the tokens as OpenAI does."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _finished(choices: list[Spoken]) -> Iterator[tuple[int, Spoken, Finished]]:
    for index, spoken in enumerate(choices):
        assert spoken.finished is not None  # a request ends well when all its choices have ended
        yield index, spoken, spoken.finished


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
