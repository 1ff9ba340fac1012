"""Request body of /v1/responses. A null is equivalent to an omitted field."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import Messages, Tools
from antiphon.gateway.http.openai.schema import (
    Effort,
    Json,
    SamplingFields,
    TokensMax,
    TopLogprobs,
    Verbosity,
)

METADATA_MAX = 16
InputItems = Messages[Json]
FunctionTools = Tools[Json]

Label = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=METADATA_MAX)
]


def _is(meaning: str) -> Meta:
    return Meta(description=meaning)


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


class ResponsesBody(SamplingFields, frozen=True, kw_only=True):
    """Create a response: text, reasoning and tool calls for an input."""

    input: Annotated[str | InputItems, _is("Input of the model: text, or a list of items.")]
    instructions: Annotated[
        str | None,
        _is("System message. The instructions of earlier responses are not carried over."),
    ] = None
    previous_response_id: Annotated[
        str | None, _is("Id of a stored response to continue from.")
    ] = None
    store: Annotated[
        bool | None, _is("Whether to store the response for later retrieval. Defaults to true.")
    ] = None
    background: Annotated[
        bool | None,
        _is("Whether to return immediately and generate the response in the background."),
    ] = None
    max_output_tokens: Annotated[
        TokensMax | None,
        _is(
            "Maximum number of tokens to generate, reasoning included. Defaults to what the "
            "context length allows."
        ),
    ] = None
    tools: Annotated[
        FunctionTools | None,
        _is(
            "Tools that the model may call: functions, custom tools and namespaces. Built-in "
            "tools are ignored."
        ),
    ] = None
    tool_choice: Annotated[
        str | Json | None,
        _is("How the model chooses tools: `auto`, `none`, `required`, or a function by name."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, _is("Whether the model may make several tool calls. Defaults to true.")
    ] = None
    text: Annotated[TextOptions | None, _is("Options for the text output, such as its format.")] = (
        None
    )
    reasoning: Annotated[ReasoningOptions | None, _is("Reasoning options.")] = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=64)] | None,
        _is(
            "Additional output to include: `message.output_text.logprobs`, "
            "`reasoning.encrypted_content`."
        ),
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None, _is("Number of most likely tokens to return log probabilities for.")
    ] = None
    truncation: Annotated[
        Literal["disabled", "auto"] | None,
        _is(
            "`auto` drops the oldest items of an input that is too long; `disabled` (default)"
            " returns an error."
        ),
    ] = None
    metadata: Annotated[
        Metadata | None, _is("Key-value pairs stored and returned with the response.")
    ] = None
    user: Annotated[
        str | None, _is("End-user identifier; returned with the response, otherwise ignored.")
    ] = None
    safety_identifier: Annotated[
        str | None, _is("End-user identifier; returned with the response, otherwise ignored.")
    ] = None
    prompt_cache_key: Annotated[
        str | None,
        _is("Returned with the response, otherwise ignored: prefix caching is automatic."),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        _is("Accepted and ignored: there is one service tier."),
    ] = None
    stream_options: Annotated[
        ResponsesStreamOptions | None, _is("Options for streaming responses.")
    ] = None
    chat_template_kwargs: Annotated[
        Json | None, _is("Additional variables for the chat template.")
    ] = None
