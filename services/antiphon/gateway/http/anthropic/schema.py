"""The bodies of messages and of their count: every field, its bounds and its meaning.

The reader, the OpenAPI document and the table in the docs are all made from these structs. A null
is as good as nothing. `cache_control` and `citations` of blocks are not read: what may be found in
the prefix cache is found there without marks, and nothing is cited.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import Messages, Name, Parts, Tools
from antiphon.wire.sampling import STOPS_MAX, StopString, TopP

Json = dict[str, msgspec.Raw]
TokensMax = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Budget = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=0)]
StopSequences = Annotated[list[StopString], Meta(max_length=STOPS_MAX)]
CallId = Annotated[str, Meta(min_length=1, max_length=1024)]


def _is(meaning: str) -> Meta:
    return Meta(description=meaning)


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """Text."""

    text: str


class ImageBlock(msgspec.Struct, frozen=True, tag="image", tag_field="type"):
    """An image. Refused: this model reads text only."""

    source: Json


class DocumentBlock(msgspec.Struct, frozen=True, tag="document", tag_field="type"):
    """A document; refused."""


class SearchResultBlock(msgspec.Struct, frozen=True, tag="search_result", tag_field="type"):
    """What a search has found; refused."""


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag="tool_reference", tag_field="type"):
    """A tool that was searched for; refused."""


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field="type"):
    """What the assistant thought. The signature is a digest of it, and is not checked."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag="redacted_thinking", tag_field="type"):
    """Thinking that its maker alone can read; the model sees nothing of it."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    """A call of the assistant's."""

    id: CallId
    name: Name
    input: Json


Unread = ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
"""Blocks that are known, and that this model cannot read."""


class ToolResultBlock(
    msgspec.Struct, frozen=True, kw_only=True, tag="tool_result", tag_field="type"
):
    """What came of a call; that of an error begins with the word `Error`."""

    tool_use_id: CallId
    content: str | Parts[TextBlock | Unread] | None = None
    is_error: bool | None = None


Block = TextBlock | Unread | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageParam(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation. Neighbours of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Parts[Block]


class ToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs. One with a `type` of Anthropic's own is refused."""

    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: Annotated[Json | None, _is("The JSON schema of its input, an object's.")] = None
    input_examples: Annotated[
        Parts[Json] | None,
        _is("For the chat template, which may show them or not."),
    ] = None
    strict: Annotated[bool | None, _is("The input keeps to the schema.")] = None
    allowed_callers: Annotated[Parts[str] | None, _is("Only `direct` is served.")] = None
    defer_loading: Annotated[bool | None, _is("Refused: there is no search for tools.")] = None
    eager_input_streaming: Annotated[
        bool | None, _is("Changes nothing: input is told as the model writes it.")
    ] = None


class ToolChoiceBody(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model calls tools: as it likes, at least one, this one, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model thinks before it answers.

    `adaptive` leaves it to the model. What is `omitted` is told as a block without text.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[
        Budget | None, _is("Where thinking is ended; needed with `enabled`, less than max_tokens.")
    ] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer: JSON of a schema."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is to be."""

    format: OutputFormat | None = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        _is("For the chat template, as `reasoning_effort`."),
    ] = None
    task_budget: Annotated[Json | None, _is("Refused: say max_tokens.")] = None


class MessagesMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A label."""

    user_id: str | None = None


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that the server holds; there are none here."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True):
    """How a conversation is shortened before the model reads it."""

    edits: list[Json] | None = None


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    """What messages and their count share."""

    model: Annotated[str | None, _is("The served model; null takes it.")] = None
    messages: Annotated[
        Messages[MessageParam],
        Meta(
            min_length=1,
            description="The conversation. An assistant's message at its end begins the answer.",
        ),
    ]
    system: Annotated[str | Parts[TextBlock] | None, _is("What comes before it.")] = None
    tools: Annotated[Tools[ToolBody] | None, _is("What the model may call.")] = None
    tool_choice: Annotated[
        ToolChoiceBody | None, _is("Whether it calls; as it likes unless said.")
    ] = None
    thinking: Annotated[
        ThinkingBody | None, _is("Whether it thinks; the chat template's own way unless said.")
    ] = None
    output_config: Annotated[OutputConfig | None, _is("How the answer is to be.")] = None
    output_format: Annotated[
        OutputFormat | None, _is("The older name of `output_config.format`.")
    ] = None
    thread: Annotated[
        Thread | None, _is("`create` is ignored: nothing is held. There is nothing to `continue`.")
    ] = None
    context_management: Annotated[
        ContextManagement | None,
        _is("Ignored: the conversation is used as it is sent. Compaction is refused."),
    ] = None
    speed: Annotated[Literal["standard", "fast"] | None, _is("Ignored: there is one speed.")] = None
    billing_policy: Annotated[Json | None, _is("Ignored: nothing is billed.")] = None
    diagnostics: Annotated[
        Json | None, _is("Ignored: what earlier requests had in common is not kept.")
    ] = None
    fallbacks: Annotated[Json | list[Json] | str | None, _is("Ignored: one model is served.")] = (
        None
    )
    fallback_credit_token: Annotated[Json | str | None, _is("Ignored: one model is served.")] = None
    user_profile_id: Annotated[str | None, _is("Ignored: a label.")] = None
    cache_control: Annotated[
        Json | None, _is("Changes nothing: prefixes are found in the cache without marks.")
    ] = None


class MessagesBody(PromptBody, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[
        TokensMax, _is("Longest answer, thinking included. The context may end it before; 0: none.")
    ]
    temperature: Annotated[
        Temperature | None, _is("0 takes the likeliest token; 1 is the model as it is.")
    ] = None
    top_p: Annotated[TopP | None, _is("Draws from the likeliest tokens up to this mass.")] = None
    top_k: Annotated[TopK | None, _is("Draws from so many; 0 from all.")] = None
    stop_sequences: Annotated[
        StopSequences | None, _is("Texts that end the answer, and are left out of it.")
    ] = None
    stream: Annotated[bool | None, _is("Tells the answer as it is made.")] = None
    metadata: Annotated[MessagesMetadata | None, _is("Changes nothing.")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, _is("There is one tier: `standard`.")
    ] = None


class CountBody(PromptBody, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""
