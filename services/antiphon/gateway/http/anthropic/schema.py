"""Bodies, rejected fields, responses and stream events of the Messages API.

The structs define parsing, the OpenAPI document and the reference page. A null is equivalent to
an omitted field. `cache_control` and `citations` of content blocks are ignored: prefix caching is
automatic and no citations are produced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.fields import NOTHING, UnsupportedField
from antiphon.gateway.http.core.image_options import ImageOptions
from antiphon.gateway.http.core.limits import Json, Messages, Name, Parts, TokensMax, Tools
from antiphon.wire.sampling import STOPS_MAX, StopString, TopP

if TYPE_CHECKING:
    from antiphon.wire.base import Usage

Budget = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=0)]
StopSequences = Annotated[list[StopString], Meta(max_length=STOPS_MAX)]
CallId = Annotated[str, Meta(min_length=1, max_length=1024)]


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """Text content."""

    text: str


class ImageSource(msgspec.Struct, frozen=True):
    """An image: `data` in base64, or an http, https, `data:` or file URL."""

    type: Literal["base64", "url"]
    data: str | None = None
    url: str | None = None
    media_type: str | None = None


class ImageBlock(msgspec.Struct, frozen=True, tag="image", tag_field="type"):
    """Image content, in user messages."""

    source: ImageSource


class DocumentBlock(msgspec.Struct, frozen=True, tag="document", tag_field="type"):
    """Document content. Rejected."""


class SearchResultBlock(msgspec.Struct, frozen=True, tag="search_result", tag_field="type"):
    """Search result content. Rejected."""


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag="tool_reference", tag_field="type"):
    """Reference to a tool found by tool search. Rejected."""


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field="type"):
    """Reasoning of an earlier assistant message. The signature is a digest and is not verified."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag="redacted_thinking", tag_field="type"):
    """Encrypted reasoning of another provider. Ignored: the model does not see it."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    """A tool call of an earlier assistant message."""

    id: CallId
    name: Name
    input: Json


Unread = ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
"""Documented content blocks that this model cannot read."""


class ToolResultBlock(
    msgspec.Struct, frozen=True, kw_only=True, tag="tool_result", tag_field="type"
):
    """Result of a tool call. The text of a failed call is prefixed with `Error`."""

    tool_use_id: CallId
    content: str | Parts[TextBlock | Unread] | None = None
    is_error: bool | None = None


Block = TextBlock | Unread | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageParam(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation.

    Consecutive messages of the same role are merged into one turn.
    """

    role: Literal["user", "assistant", "system"]
    content: str | Parts[Block]


class ToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A client-side tool. Anthropic's server tools, which have a `type`, are rejected."""

    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: Json | None = None
    """JSON schema of the tool's input, which must be an object."""
    input_examples: Parts[Json] | None = None
    """Example inputs, passed to the chat template, which may ignore them."""
    strict: bool | None = None
    """Whether to constrain the input to the schema."""
    allowed_callers: Parts[str] | None = None
    """Callers that may use the tool. Only `direct` is supported."""
    defer_loading: bool | None = None
    """Not supported: there is no tool search."""
    eager_input_streaming: bool | None = None
    """Accepted and ignored: tool input is always streamed as it is generated."""


class ToolChoiceBody(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and which tools the model calls: `auto`, `any`, `tool` (the named one) or `none`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model reasons before it answers.

    With `adaptive` the model decides. With `omitted` the thinking block is returned without text.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None
    """Maximum number of reasoning tokens. Required with `enabled`; must be less than
    `max_tokens`."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Output format: JSON that conforms to a schema."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options for the model's output."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Reasoning effort, passed to the chat template as `reasoning_effort`."""
    task_budget: Json | None = None
    """Not supported: use `max_tokens`."""


class MessagesMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a request."""

    user_id: str | None = None


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """A server-side conversation. Conversations are not stored by this server."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True):
    """Context management. Only the default, which changes nothing, is supported."""

    edits: list[Json] | None = None


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields common to creating a message and counting its tokens."""

    model: str | None = None
    """Name of the served model. Optional."""
    messages: Annotated[Messages[MessageParam], Meta(min_length=1)]
    """The conversation so far. A final assistant message is continued by the response."""
    system: str | Parts[TextBlock] | None = None
    """System prompt, placed before the conversation."""
    tools: Tools[ToolBody] | None = None
    """Tools that the model may call."""
    tool_choice: ToolChoiceBody | None = None
    """How the model chooses tools. Defaults to `auto`."""
    thinking: ThinkingBody | None = None
    """Whether the model reasons before it answers. Defaults to the chat template's behavior."""
    output_config: OutputConfig | None = None
    """Options for the model's output, such as its format."""
    output_format: OutputFormat | None = None
    """Deprecated: use `output_config.format`."""
    mm_processor_kwargs: ImageOptions | None = None
    """Numbers of pixels between which images are scaled."""
    thread: Thread | None = None
    """`create` is accepted and ignored: conversations are not stored. `continue` is rejected."""
    context_management: ContextManagement | None = None
    """Accepted and ignored: the conversation is used as sent. Compaction is rejected."""
    speed: Literal["standard", "fast"] | None = None
    """Accepted and ignored: there is one speed."""
    billing_policy: Json | None = None
    """Accepted and ignored: requests are not billed."""
    diagnostics: Json | None = None
    """Accepted and ignored: no data about earlier requests is stored."""
    fallbacks: Json | list[Json] | str | None = None
    """Accepted and ignored: one model is served."""
    fallback_credit_token: Json | str | None = None
    """Accepted and ignored: one model is served."""
    user_profile_id: str | None = None
    """Accepted and ignored."""
    cache_control: Json | None = None
    """Accepted and ignored: prefix caching is automatic."""

    UNSUPPORTED: ClassVar = {
        "compaction": UnsupportedField("compaction of conversations is not supported"),
        "mcp_servers": UnsupportedField("MCP servers are not supported", NOTHING),
    }


class MessagesBody(PromptBody, frozen=True, kw_only=True):
    """Create a message: the assistant's reply to a conversation."""

    max_tokens: TokensMax
    """Maximum number of tokens to generate, reasoning included. 0 only processes the prompt.
    Generation may end earlier at the context length."""
    temperature: Temperature | None = None
    """Sampling temperature. 0 is greedy sampling."""
    top_p: TopP | None = None
    """Nucleus sampling: total probability of the tokens to sample from."""
    top_k: TopK | None = None
    """Number of most likely tokens to consider. 0: all."""
    stop_sequences: StopSequences | None = None
    """Sequences that stop generation; not returned."""
    stream: bool | None = None
    """Whether to stream the response as it is generated."""
    metadata: MessagesMetadata | None = None
    """Accepted and ignored."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Accepted and ignored: the only tier is `standard`."""

    UNSUPPORTED: ClassVar = {
        **PromptBody.UNSUPPORTED,
        "container": UnsupportedField("containers for code execution are not supported", NOTHING),
        "inference_geo": UnsupportedField(
            "requests are placed by the scheduler; clients cannot select a worker", ("", "global")
        ),
    }


class CountBody(PromptBody, frozen=True, kw_only=True):
    """Count the input tokens of a message without creating it."""


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
