"""Builds content blocks from parsed output, as events or complete."""

from __future__ import annotations

import base64
import hashlib
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.anthropic.replies import (
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlockDelta,
    ThinkingDelta,
)
from antiphon.gateway.http.anthropic.schema import Json, TextBlock, ThinkingBlock, ToolUseBlock
from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from antiphon.gateway.http.anthropic.replies import AnswerBlock, BlockEvent
    from antiphon.gateway.parsing.events import Event


class ThinkingDisplay(Enum):
    """How to return reasoning."""

    WHOLE = "whole"
    OMITTED = "omitted"
    """A block without text, with its signature."""
    HIDDEN = "hidden"


class ContentBlockBuilder:
    """Turns the output events of one message into events of its content blocks."""

    def __init__(self, display: ThinkingDisplay) -> None:
        """Create a builder without blocks."""
        self._display = display
        self._index = -1
        self._open: type[AnswerBlock] | None = None
        self._digest = hashlib.sha256()

    def add(self, events: Iterable[Event]) -> Iterator[BlockEvent]:
        """Return the events of more output."""
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
        """Close the open block."""
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
    """Assemble complete blocks."""
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
