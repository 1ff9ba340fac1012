"""The body of a response: every field, its bounds and its meaning. A null is as good as nothing."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import Messages, Tools
from antiphon.gateway.http.openai.schema import (
    Effort,
    Json,
    Sampled,
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
    """How much the model thinks. What it thinks is told as it is: there are no summaries."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the text. Name and description of a schema change nothing."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the text is like."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream of events has besides."""

    include_obfuscation: bool | None = None


class ResponsesBody(Sampled, frozen=True, kw_only=True):
    """POST /v1/responses."""

    input: Annotated[
        str | InputItems,
        _is("What the user says, or the items of a conversation."),
    ]
    instructions: Annotated[
        str | None, _is("The system's message; those of earlier responses do not go on.")
    ] = None
    previous_response_id: Annotated[
        str | None, _is("A stored response: the input goes on from its conversation.")
    ] = None
    store: Annotated[bool | None, _is("Keeps the response for a while; true unless said.")] = None
    background: Annotated[
        bool | None, _is("Returns at once; the answer is made whether or not anybody waits.")
    ] = None
    max_output_tokens: Annotated[
        TokensMax | None, _is("Longest answer; what the context leaves unless said.")
    ] = None
    tools: Annotated[
        FunctionTools | None,
        _is("Functions, custom tools and namespaces; built-in tools are left out."),
    ] = None
    tool_choice: Annotated[
        str | Json | None, _is("auto, none, required, or one function by its name.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, _is("Whether there may be several calls; true unless said.")
    ] = None
    text: Annotated[TextOptions | None, _is("The form of the text.")] = None
    reasoning: Annotated[ReasoningOptions | None, _is("How much the model thinks.")] = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=64)] | None,
        _is("Additional output: `message.output_text.logprobs`, `reasoning.encrypted_content`."),
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None, _is("Number of most likely tokens to return log probabilities for.")
    ] = None
    truncation: Annotated[
        Literal["disabled", "auto"] | None,
        _is("`auto` leaves out the oldest items of what is too long; else it is refused."),
    ] = None
    metadata: Annotated[Metadata | None, _is("The client's labels; told with the response.")] = None
    user: Annotated[str | None, _is("The client's; told with the response.")] = None
    safety_identifier: Annotated[str | None, _is("The client's; told with the response.")] = None
    prompt_cache_key: Annotated[str | None, _is("The client's; prefixes are found without it.")] = (
        None
    )
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None, _is("There is one.")
    ] = None
    stream_options: Annotated[ResponsesStreamOptions | None, _is("What a stream has besides.")] = (
        None
    )
    chat_template_kwargs: Annotated[Json | None, _is("More variables for the chat template.")] = (
        None
    )
