"""Request body of /v1/responses. A null is equivalent to an omitted field."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.generation_fields import Json, TokensMax
from antiphon.gateway.http.core.limits import Messages, Tools
from antiphon.gateway.http.core.logprobs import TopLogprobs
from antiphon.gateway.http.openai.schema import Effort, OpenAiFields, Verbosity

METADATA_MAX = 16
InputItems = Messages[Json]
FunctionTools = Tools[Json]

Label = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=METADATA_MAX)
]


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning options. Reasoning is returned in full; summaries are not generated."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Format of the text output. The name and description of a schema are ignored."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for the text output."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for streaming responses."""

    include_obfuscation: bool | None = None


class ResponsesBody(OpenAiFields):
    """Create a response: text, reasoning and tool calls for an input."""

    input: str | InputItems
    """Input of the model: text, or a list of items."""
    instructions: str | None = None
    """System message. The instructions of earlier responses are not carried over."""
    previous_response_id: str | None = None
    """Id of a stored response to continue from."""
    store: bool | None = None
    """Whether to store the response for later retrieval. Defaults to true."""
    background: bool | None = None
    """Whether to return immediately and generate the response in the background."""
    max_output_tokens: TokensMax | None = None
    """Maximum number of tokens to generate, reasoning included. Defaults to what the context length
    allows."""
    tools: FunctionTools | None = None
    """Tools that the model may call: functions, custom tools and namespaces. Built-in tools are
    ignored."""
    tool_choice: str | Json | None = None
    """How the model chooses tools: `auto`, `none`, `required`, or a function by name."""
    parallel_tool_calls: bool | None = None
    """Whether the model may make several tool calls. Defaults to true."""
    text: TextOptions | None = None
    """Options for the text output, such as its format."""
    reasoning: ReasoningOptions | None = None
    """Reasoning options."""
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    """Additional output to include: `message.output_text.logprobs`,
    `reasoning.encrypted_content`."""
    top_logprobs: TopLogprobs | None = None
    """Number of most likely tokens to return log probabilities for."""
    truncation: Literal["disabled", "auto"] | None = None
    """`auto` drops the oldest items of an input that is too long; `disabled` (default) returns an
    error."""
    metadata: Metadata | None = None
    """Key-value pairs stored and returned with the response."""
    user: str | None = None
    """End-user identifier; returned with the response, otherwise ignored."""
    safety_identifier: str | None = None
    """End-user identifier; returned with the response, otherwise ignored."""
    prompt_cache_key: str | None = None
    """Returned with the response, otherwise ignored: prefix caching is automatic."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """Accepted and ignored: there is one service tier."""
    stream_options: ResponsesStreamOptions | None = None
    """Options for streaming responses."""
    chat_template_kwargs: Json | None = None
    """Additional variables for the chat template."""
