"""How Ollama's clients hear an answer: whole, or a line for each piece; counts come last."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec

from antiphon.gateway.http.errors import plain
from antiphon.gateway.http.ndjson import CONTENT_TYPE, line
from antiphon.gateway.http.ollama.bodies import OllamaCall, OllamaFunction
from antiphon.gateway.http.ollama.replies import (
    UNSET,
    OllamaChatReply,
    OllamaGenerateReply,
    OllamaMessage,
    OllamaReply,
    measured,
    now,
)
from antiphon.gateway.http.openai.bodies import Json
from antiphon.gateway.http.openai.logprobs import chat_logprobs
from antiphon.gateway.http.openai.speech import Speech
from antiphon.gateway.http.voice import Voice
from antiphon.gateway.owner.actions import Finished, Said
from antiphon.gateway.parsing.events import CallEnd, Collector, Content, Reasoning
from antiphon.wire.base import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from antiphon.gateway.chorus import Answer
    from antiphon.gateway.http.openai.logprobs import TokenLogprob
    from antiphon.gateway.http.openai.telling import Telling
    from antiphon.gateway.parsing.events import Call, Event
    from antiphon.gateway.stream import Stream
    from antiphon.wire.base import Usage
    from antiphon.wire.details import DetailPiece
    from antiphon.wire.errors import EngineError


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one object tells of what was said."""

    content: str = ""
    thinking: str = ""
    calls: tuple[OllamaCall, ...] = ()


class OllamaVoice(Voice):
    """What chats and prompts have in common; an answer is one choice."""

    CONTENT_TYPE: ClassVar[str] = CONTENT_TYPE

    def __init__(self, model: str, stream: Stream, telling: Telling) -> None:
        self._model = model
        self._stream = stream
        self._logprobs_told = telling.logprobs
        self._speech = Speech(telling.hearing, inside=stream.inside)
        self._collector = Collector()
        self._reason = FinishReason.STOP

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """One object."""
        (answer,) = answers
        (spoken,) = answer.choices
        events = [*self._speech.feed(spoken.text), *self._speech.end()]
        self._reason = spoken.end.reason
        told = self._last(_joined(self._pieces(events)), answer.usage)
        return msgspec.json.encode(
            msgspec.structs.replace(told, logprobs=self._logprobs(spoken.details))
        )

    def begin(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def chunks(self, prompt: int, events: Sequence[Said | Finished]) -> bytes:
        """A line for each text, for each piece of thinking, and for each call."""
        return b"".join(map(self._lines, events))

    def ping(self) -> bytes:
        """A line without text: this format has no comments, and clients read every line."""
        return line(msgspec.json.encode(self._told(Piece(), done=False)))

    def end(self, usages: Sequence[Usage]) -> bytes:
        """A line without text, with why it ended, counts and durations."""
        (usage,) = usages
        return line(msgspec.json.encode(self._last(Piece(), usage)))

    def failure(self, error: EngineError) -> bytes:
        """A line in the form of every error."""
        return line(msgspec.json.encode(plain(error)))

    @abstractmethod
    def _told(self, piece: Piece, *, done: bool) -> OllamaReply:
        """An object with a piece of the answer."""

    def _last(self, piece: Piece, usage: Usage) -> OllamaReply:
        return msgspec.structs.replace(
            self._told(piece, done=True),
            done_reason=self._reason.value,
            **measured(self._stream, usage),
        )

    def _lines(self, said: Said | Finished) -> bytes:
        if isinstance(said, Finished):
            self._reason = said.reason
            pieces, logprobs = list(self._pieces(self._speech.end())), UNSET
        else:
            pieces = list(self._pieces(self._speech.feed(said.text)))
            logprobs = self._logprobs(said.details)
        if logprobs is not UNSET and not pieces:
            pieces = [Piece()]
        lines: list[bytes] = []
        for number, piece in enumerate(pieces):
            told = self._told(piece, done=False)
            if number == 0:
                told = msgspec.structs.replace(told, logprobs=logprobs)
            lines.append(line(msgspec.json.encode(told)))
        return b"".join(lines)

    def _logprobs(self, details: DetailPiece | None) -> list[TokenLogprob] | msgspec.UnsetType:
        told = chat_logprobs(details) if self._logprobs_told else None
        return UNSET if told is None else told.content

    def _pieces(self, events: Iterable[Event]) -> Iterator[Piece]:
        for event in events:
            match event:
                case Content(text):
                    yield Piece(content=text)
                case Reasoning(text):
                    yield Piece(thinking=text)
                case CallEnd(index):
                    self._collector.add(event)
                    yield _called(self._collector.parsed().calls[index])
                case _:
                    self._collector.add(event)


class OllamaChatVoice(OllamaVoice):
    """POST /api/chat."""

    def _told(self, piece: Piece, *, done: bool) -> OllamaReply:
        message = OllamaMessage(
            content=piece.content,
            thinking=piece.thinking or UNSET,
            tool_calls=piece.calls or UNSET,
        )
        return OllamaChatReply(model=self._model, created_at=now(), done=done, message=message)


class OllamaGenerateVoice(OllamaVoice):
    """POST /api/generate."""

    def _told(self, piece: Piece, *, done: bool) -> OllamaReply:
        return OllamaGenerateReply(
            model=self._model,
            created_at=now(),
            done=done,
            response=piece.content,
            thinking=piece.thinking or UNSET,
        )


def _joined(pieces: Iterable[Piece]) -> Piece:
    every = list(pieces)
    return Piece(
        content="".join(piece.content for piece in every),
        thinking="".join(piece.thinking for piece in every),
        calls=tuple(call for piece in every for call in piece.calls),
    )


def _called(call: Call) -> Piece:
    """A call, whole. One that was cut off, or whose arguments are no object, is text like any."""
    arguments = _object(call.arguments) if call.complete else None
    if arguments is None:
        return Piece(content=f'{{"name": "{call.name}", "arguments": {call.arguments}')
    function = OllamaFunction(index=call.index, name=call.name, arguments=arguments)
    return Piece(calls=(OllamaCall(id=call.id, function=function),))


def _object(text: str) -> Json | None:
    """The members of a JSON object, in one line; None: it is none."""
    try:
        return msgspec.json.decode(msgspec.json.format(text.encode(), indent=-1), type=Json)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
