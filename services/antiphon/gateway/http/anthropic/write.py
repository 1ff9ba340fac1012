"""Writer of the Messages API."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.anthropic.parse import ParsedMessagesRequest, ThinkingDisplay
from antiphon.gateway.http.anthropic.schema import (
    AnswerBlock,
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    Json,
    MessageDelta,
    MessageReply,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    Stop,
    StopReason,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    usage_body,
)
from antiphon.gateway.http.core.chat import OutputParser
from antiphon.gateway.http.core.errors import messages_envelope
from antiphon.gateway.http.core.writer import ResponseWriter, named_event
from antiphon.gateway.owner.actions import Finished, TextDelta
from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.codec import id_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from antiphon.gateway.stream.stream import CollectedResponse, RequestStream
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import ModelName

MessagesStreamEvent = MessageStart | Ping | MessageDelta | MessageStop


class MessagesResponseWriter(ResponseWriter):
    def __init__(
        self, stream: RequestStream, parsed: ParsedMessagesRequest, model: ModelName
    ) -> None:
        self._stream = stream
        self._model = model
        self._parser = OutputParser(
            parsed.parser_options, starts_in_reasoning=stream.starts_in_reasoning
        )
        self._blocks = ContentBlockBuilder(parsed.display)
        # If the context leaves less than was requested, the context ends the output.
        self._cut = stream.submit.sampling.max_new_tokens < parsed.tokens_max
        self._begun = False
        self._finished: Finished | None = None

    def full_response(self, answers: Sequence[CollectedResponse]) -> bytes:
        (answer,) = answers
        (collected,) = answer.choices
        block_events = self._blocks.add(self._parser.feed(collected.text))
        blocks = assemble_blocks([*block_events, *self._flush()])
        message = self._message(answer.usage, self._stop(collected.end))
        return msgspec.json.encode(msgspec.structs.replace(message, content=blocks))

    def chunks(self, prompt: int, events: Sequence[TextDelta | Finished]) -> bytes:
        pieces = [] if self._begun else [self._start(_first_usage(events))]
        for event in events:
            if isinstance(event, TextDelta):
                blocks = self._blocks.add(self._parser.feed(event.text))
                pieces += map(_written, blocks)
            else:
                self._finished = event
                pieces += map(_written, self._flush())
        return b"".join(pieces)

    def ping(self) -> bytes:
        """Return a ping event. It starts the message, whose prompt then counts as not cached."""
        return _written(Ping()) if self._begun else self._start(None)

    def end(self, usages: Sequence[Usage]) -> bytes:
        (usage,) = usages
        assert self._finished is not None, "a successful request has a finished choice"
        delta = MessageDelta(self._stop(self._finished), usage_body(usage))
        return _written(delta) + _written(MessageStop())

    def failure(self, error: EngineError) -> bytes:
        envelope = messages_envelope(error, self._stream.submit.request_id)
        return named_event("error", msgspec.json.encode(envelope))

    def _start(self, usage: Usage | None) -> bytes:
        # Not in `begin`: the first text knows the cache counts.
        self._begun = True
        tokens = id_count(self._stream.submit.prompt_ids)
        message = self._message(usage or Usage(prompt_tokens=tokens), None)
        return _written(MessageStart(message)) + _written(Ping())

    def _flush(self) -> list[BlockEvent]:
        return [*self._blocks.add(self._parser.end()), *self._blocks.end()]

    def _message(self, usage: Usage, stop: Stop | None) -> MessageReply:
        return MessageReply(
            id=f"msg_{self._stream.submit.request_id}",
            model=self._model,
            content=[],
            stop_reason=stop.stop_reason if stop else None,
            stop_sequence=stop.stop_sequence if stop else None,
            usage=usage_body(usage),
        )

    def _stop(self, finished: Finished) -> Stop:
        if finished.reason is FinishReason.STOP and isinstance(finished.matched_stop, str):
            return Stop(stop_reason="stop_sequence", stop_sequence=finished.matched_stop)
        return Stop(stop_reason=self._reason(finished.reason))

    def _reason(self, reason: FinishReason) -> StopReason:
        """Return the stop reason; tool calls count only if the model ended its turn."""
        if reason is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._cut else "max_tokens"
        if reason is FinishReason.ABORT:
            return "pause_turn"
        return "tool_use" if self._parser.has_tool_calls else "end_turn"


def _first_usage(events: Sequence[TextDelta | Finished]) -> Usage | None:
    usages = (event.usage for event in events if isinstance(event, TextDelta))
    return next((usage for usage in usages if usage is not None), None)


def _written(event: MessagesStreamEvent | BlockEvent) -> bytes:
    return named_event(str(type(event).__struct_config__.tag), msgspec.json.encode(event))


class ContentBlockBuilder:
    """Turns the output events of one message into events of its content blocks."""

    def __init__(self, display: ThinkingDisplay) -> None:
        self._display = display
        self._index = -1
        self._open: type[AnswerBlock] | None = None
        self._digest = hashlib.sha256()

    def add(self, events: Iterable[Event]) -> Iterator[BlockEvent]:
        for event in events:
            match event:
                case Content(text):
                    yield from self._ensure_block(TextBlock(text=""))
                    yield self._delta(TextBlockDelta(text))
                case Reasoning(text):
                    yield from self._think(text)
                case CallBegin(_, call_id, name):
                    yield from self._begin(ToolUseBlock(id=call_id, name=name, input={}))
                case CallArguments(_, text):
                    yield self._delta(InputJsonDelta(text))
                case CallEnd():
                    yield from self.end()

    def end(self) -> Iterator[BlockEvent]:
        if self._open is None:
            return
        if self._open is ThinkingBlock:
            signature = base64.b64encode(self._digest.digest()).decode()
            yield self._delta(SignatureDelta(signature))
        self._open = None
        yield BlockStop(self._index)

    def _think(self, text: str) -> Iterator[BlockEvent]:
        if self._display is ThinkingDisplay.HIDDEN:
            return
        yield from self._ensure_block(ThinkingBlock(thinking=""))
        self._digest.update(text.encode())
        if self._display is ThinkingDisplay.WHOLE:
            yield self._delta(ThinkingDelta(text))

    def _ensure_block(self, block: TextBlock | ThinkingBlock) -> Iterator[BlockEvent]:
        """Start a block, unless one of its kind is open."""
        if self._open is not type(block):
            yield from self._begin(block)

    def _begin(self, block: AnswerBlock) -> Iterator[BlockEvent]:
        yield from self.end()
        self._index += 1
        self._open = type(block)
        self._digest = hashlib.sha256()
        yield BlockStart(self._index, block)

    def _delta(
        self, delta: TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta
    ) -> BlockDelta:
        return BlockDelta(self._index, delta)


def assemble_blocks(events: Iterable[BlockEvent]) -> list[AnswerBlock]:
    blocks: list[AnswerBlock] = []
    pieces: list[str] = []
    signature = ""
    for event in events:
        match event:
            case BlockStart(_, block):
                blocks.append(block)
                pieces, signature = [], ""
            case BlockDelta(_, delta):
                match delta:
                    case SignatureDelta(signature):
                        pass
                    case TextBlockDelta(piece) | ThinkingDelta(piece) | InputJsonDelta(piece):
                        pieces.append(piece)
            case BlockStop():
                blocks[-1] = _append(blocks[-1], "".join(pieces), signature)
    return blocks


def _append(block: AnswerBlock, text: str, signature: str) -> AnswerBlock:
    match block:
        case TextBlock():
            return TextBlock(text=text)
        case ThinkingBlock():
            return ThinkingBlock(thinking=text, signature=signature)
        case ToolUseBlock():
            return msgspec.structs.replace(block, input=_input(text))


def _input(text: str) -> Json:
    """Return the input of a call; empty if the model's text is not an object or was cut off."""
    try:
        return msgspec.json.decode(text or "{}", type=Json)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
