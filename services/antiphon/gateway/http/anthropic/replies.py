"""Response bodies and stream events of the Anthropic Messages API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.anthropic.schema import TextBlock, ThinkingBlock, ToolUseBlock

if TYPE_CHECKING:
    from antiphon.wire.base import Usage

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
]
AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request. `input_tokens` excludes tokens read from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class MessageReply(msgspec.Struct, frozen=True, kw_only=True):
    """An assistant message. `stop_sequence` is the stop sequence that ended it, if any."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class CountReply(msgspec.Struct, frozen=True):
    """Number of input tokens of a message."""

    input_tokens: int


class TextBlockDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    """Text appended to a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    """Text appended to a thinking block."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta", tag_field="type"):
    """Signature of a thinking block, sent at its end."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    """JSON text appended to the input of a tool_use block."""

    partial_json: str


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    """Start of a content block, which is empty at this point."""

    index: int
    content_block: AnswerBlock


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    """Content appended to a content block."""

    index: int
    delta: TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    """End of a content block."""

    index: int


BlockEvent = BlockStart | BlockDelta | BlockStop


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    """Start of a message, with empty content."""

    message: MessageReply


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="type"):
    """Keepalive event."""


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    """Sent after the last content block: stop reason and final token counts."""

    delta: Stop
    usage: MessagesUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    """End of the stream."""


def usage_body(usage: Usage) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
