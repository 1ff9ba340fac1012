"""Request body of /v1/responses. A null is equivalent to an omitted field."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import Messages, Tools
from antiphon.gateway.http.core.logprobs import TopLogprobs
from antiphon.gateway.http.core.sampling import Json, TokensMax, doc
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

    input: Annotated[str | InputItems, doc("Input of the model: text, or a list of items.")]
    instructions: Annotated[
        str | None,
        doc("System message. The instructions of earlier responses are not carried over."),
    ] = None
    previous_response_id: Annotated[
        str | None, doc("Id of a stored response to continue from.")
    ] = None
    store: Annotated[
        bool | None, doc("Whether to store the response for later retrieval. Defaults to true.")
    ] = None
    background: Annotated[
        bool | None,
        doc("Whether to return immediately and generate the response in the background."),
    ] = None
    max_output_tokens: Annotated[
        TokensMax | None,
        doc(
            "Maximum number of tokens to generate, reasoning included. Defaults to what the "
            "context length allows."
        ),
    ] = None
    tools: Annotated[
        FunctionTools | None,
        doc(
            "Tools that the model may call: functions, custom tools and namespaces. Built-in "
            "tools are ignored."
        ),
    ] = None
    tool_choice: Annotated[
        str | Json | None,
        doc("How the model chooses tools: `auto`, `none`, `required`, or a function by name."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, doc("Whether the model may make several tool calls. Defaults to true.")
    ] = None
    text: Annotated[TextOptions | None, doc("Options for the text output, such as its format.")] = (
        None
    )
    reasoning: Annotated[ReasoningOptions | None, doc("Reasoning options.")] = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=64)] | None,
        doc(
            "Additional output to include: `message.output_text.logprobs`, "
            "`reasoning.encrypted_content`."
        ),
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None, doc("Number of most likely tokens to return log probabilities for.")
    ] = None
    truncation: Annotated[
        Literal["disabled", "auto"] | None,
        doc(
            "`auto` drops the oldest items of an input that is too long; `disabled` (default)"
            " returns an error."
        ),
    ] = None
    metadata: Annotated[
        Metadata | None, doc("Key-value pairs stored and returned with the response.")
    ] = None
    user: Annotated[
        str | None, doc("End-user identifier; returned with the response, otherwise ignored.")
    ] = None
    safety_identifier: Annotated[
        str | None, doc("End-user identifier; returned with the response, otherwise ignored.")
    ] = None
    prompt_cache_key: Annotated[
        str | None,
        doc("Returned with the response, otherwise ignored: prefix caching is automatic."),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        doc("Accepted and ignored: there is one service tier."),
    ] = None
    stream_options: Annotated[
        ResponsesStreamOptions | None, doc("Options for streaming responses.")
    ] = None
    chat_template_kwargs: Annotated[
        Json | None, doc("Additional variables for the chat template.")
    ] = None
