"""What Anthropic clients are told: a message, whole or as events."""

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
    """Tokens of a request: those of the prompt are counted apart where the cache had them."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class MessageReply(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the assistant's. `stop_sequence` is the one that ended it."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class CountReply(msgspec.Struct, frozen=True):
    """How many tokens a prompt has."""

    input_tokens: int


class TextBlockDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    """More of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    """More of the thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta", tag_field="type"):
    """The signature of the thinking, at its end."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    """More of the input of a call, which together is JSON."""

    partial_json: str


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    """A block begins, empty."""

    index: int
    content_block: AnswerBlock


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    """More of a block."""

    index: int
    delta: TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    """A block is whole."""

    index: int


BlockEvent = BlockStart | BlockDelta | BlockStop


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    """A message begins, empty."""

    message: MessageReply


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="type"):
    """Nothing; it shows that the connection lives."""


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    """All blocks are whole; the tokens of all of it."""

    delta: Stop
    usage: MessagesUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    """All was told."""


def usage_body(usage: Usage) -> MessagesUsage:
    """Write the tokens as Anthropic does."""
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
