"""Writer of the Ollama API: one object, or a line per piece; counts are in the last one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec

from antiphon.gateway.http.core.chat import OutputParser
from antiphon.gateway.http.core.errors import plain
from antiphon.gateway.http.core.limits import Json
from antiphon.gateway.http.core.logprobs import TokenLogprob, chat_logprobs
from antiphon.gateway.http.core.writer import NDJSON, ResponseWriter, line
from antiphon.gateway.http.ollama.schema import (
    UNSET,
    OllamaCall,
    OllamaChatReply,
    OllamaFunction,
    OllamaGenerateReply,
    OllamaMessage,
    OllamaReply,
    measured,
    now,
)
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.parsing.events import (
    CallEnd,
    Collector,
    Content,
    Event,
    ParsedToolCall,
    Reasoning,
)
from antiphon.wire.base import FinishReason, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from antiphon.gateway.http.ollama.parse import ParsedOllamaRequest
    from antiphon.gateway.stream.stream import CollectedResponse, RequestStream
    from antiphon.wire.errors import EngineError
    from antiphon.wire.token_outputs import TokenOutputsChunk

    ReplyFormat = Callable[[str, "OllamaPiece"], OllamaReply]


class OllamaPiece(msgspec.Struct, frozen=True, kw_only=True):
    content: str = ""
    thinking: str = ""
    calls: tuple[OllamaCall, ...] = ()


def chat_reply(model: str, piece: OllamaPiece) -> OllamaReply:
    message = OllamaMessage(
        content=piece.content, thinking=piece.thinking or UNSET, tool_calls=piece.calls or UNSET
    )
    return OllamaChatReply(model=model, created_at=now(), done=False, message=message)


def generate_reply(model: str, piece: OllamaPiece) -> OllamaReply:
    return OllamaGenerateReply(
        model=model,
        created_at=now(),
        done=False,
        response=piece.content,
        thinking=piece.thinking or UNSET,
    )


class OllamaResponseWriter(ResponseWriter):
    """Shared by chats and prompts; a response has one choice."""

    CONTENT_TYPE: ClassVar[str] = NDJSON

    def __init__(
        self, model: str, stream: RequestStream, parsed: ParsedOllamaRequest, reply: ReplyFormat
    ) -> None:
        self._reply = partial(reply, model)
        self._stream = stream
        self._wants_logprobs = parsed.logprobs
        self._parser = OutputParser(
            parsed.parser_options, starts_in_reasoning=stream.starts_in_reasoning
        )
        self._collector = Collector()
        self._reason = FinishReason.STOP

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        (answer,) = answers
        (collected,) = answer.choices
        events = [*self._parser.feed(collected.text), *self._parser.end()]
        self._reason = collected.end.reason
        reply = self._last(_merge_pieces(self._pieces(events)), answer.usage)
        return msgspec.json.encode(
            msgspec.structs.replace(reply, logprobs=self._logprobs(collected.details))
        )

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        """Return a line for each piece of text or reasoning, and for each tool call."""
        return b"".join(map(self._lines, events))

    def ping(self) -> bytes:
        """Return a line without text: the format has no comments, and clients parse every line."""
        return line(msgspec.json.encode(self._reply(OllamaPiece())))

    def end(self, usages: Sequence[Usage]) -> bytes:
        (usage,) = usages
        return line(msgspec.json.encode(self._last(OllamaPiece(), usage)))

    def failure(self, error: EngineError) -> bytes:
        return line(msgspec.json.encode(plain(error)))

    def _last(self, piece: OllamaPiece, usage: Usage) -> OllamaReply:
        return msgspec.structs.replace(
            self._reply(piece),
            done=True,
            done_reason=self._reason.value,
            **measured(self._stream, usage),
        )

    def _lines(self, chunk_event: TextDelta | Finished) -> bytes:
        if isinstance(chunk_event, Finished):
            self._reason = chunk_event.reason
            pieces, logprobs = list(self._pieces(self._parser.end())), UNSET
        else:
            pieces = list(self._pieces(self._parser.feed(chunk_event.text)))
            logprobs = self._logprobs(chunk_event.details)
        if logprobs is not UNSET and not pieces:
            pieces = [OllamaPiece()]
        replies = [self._reply(piece) for piece in pieces]
        if replies:
            replies[0] = msgspec.structs.replace(replies[0], logprobs=logprobs)
        return b"".join(line(msgspec.json.encode(reply)) for reply in replies)

    def _logprobs(
        self, details: TokenOutputsChunk | None
    ) -> list[TokenLogprob] | msgspec.UnsetType:
        chat = chat_logprobs(details) if self._wants_logprobs else None
        return UNSET if chat is None else chat.content

    def _pieces(self, events: Iterable[Event]) -> Iterator[OllamaPiece]:
        for event in events:
            match event:
                case Content(text):
                    yield OllamaPiece(content=text)
                case Reasoning(text):
                    yield OllamaPiece(thinking=text)
                case CallEnd(index):
                    self._collector.add(event)
                    yield _ollama_call(self._collector.parsed().calls[index])
                case _:
                    self._collector.add(event)


def _merge_pieces(pieces: Iterable[OllamaPiece]) -> OllamaPiece:
    every = list(pieces)
    return OllamaPiece(
        content="".join(piece.content for piece in every),
        thinking="".join(piece.thinking for piece in every),
        calls=tuple(call for piece in every for call in piece.calls),
    )


def _ollama_call(call: ParsedToolCall) -> OllamaPiece:
    """Convert a tool call; a truncated one, or one whose arguments are no object, is text."""
    arguments = _object(call.arguments) if call.complete else None
    if arguments is None:
        return OllamaPiece(content=f'{{"name": "{call.name}", "arguments": {call.arguments}')
    function = OllamaFunction(index=call.index, name=call.name, arguments=arguments)
    return OllamaPiece(calls=(OllamaCall(id=call.id, function=function),))


def _object(text: str) -> Json | None:
    """Return a JSON object on one line; None if the text is not an object."""
    try:
        return msgspec.json.decode(msgspec.json.format(text.encode(), indent=-1), type=Json)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
