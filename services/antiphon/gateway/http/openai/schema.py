"""Request bodies of chat and text completions.

These structs define parsing, the OpenAPI document and the reference page. A null is equivalent to
an omitted field, as in SGLang.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import CallId, Ids, Messages, Name, Parts, Tools
from antiphon.gateway.http.core.logprobs import TopLogprobs
from antiphon.gateway.http.core.sampling import (
    Choices,
    Json,
    Rid,
    SglangSamplingFields,
    TokensMax,
    doc,
)
from antiphon.gateway.sessions.session import SessionParams
from antiphon.wire.digests import CacheSaltText
from antiphon.wire.processors import TokenId
from antiphon.wire.sampling import Priority, Seed

COMPLETION_TOKENS = 16
"""Default of `max_tokens` of a text completion."""
PROMPTS_MAX = 256


class StreamOptions(msgspec.Struct, frozen=True):
    """Options for streaming responses."""

    include_usage: Annotated[
        bool | None, doc("Whether to send a final chunk with the token usage of the request.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, doc("Whether to include the token usage so far in every chunk.")
    ] = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A named JSON schema. The name and the description are ignored."""

    name: str | None = None
    description: str | None = None
    schema: Json
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Output format. A structural tag is accepted in the newer form (`format`) or the older one."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Json | None = None
    structures: Tools[Json] | None = None
    triggers: Tools[str] | None = None


class OpenAiFields(SglangSamplingFields):
    """Sampling and scheduling fields common to all generation bodies."""

    model: Annotated[str | None, doc("Name of the served model. Optional.")] = None
    min_tokens: Annotated[TokensMax | None, doc("Minimum number of tokens to generate.")] = None
    seed: Annotated[Seed | None, doc("Seed for reproducible sampling.")] = None
    custom_logit_processor: Annotated[
        str | None, doc("Name of a registered logits processor. Serialized code is rejected.")
    ] = None
    stream: Annotated[bool | None, doc("Whether to stream the response as it is generated.")] = None
    priority: Annotated[
        Priority | None,
        doc("Scheduling priority; higher runs first. Requires --enable-priority-scheduling."),
    ] = None
    cache_salt: Annotated[
        CacheSaltText | None, doc("Restricts prefix cache sharing to requests with the same salt.")
    ] = None
    extra_key: Annotated[CacheSaltText | None, doc("Like `cache_salt`; both must match.")] = None


class CompletionFields(OpenAiFields):
    """Fields common to chat and text completions."""

    max_tokens: Annotated[
        TokensMax | None,
        doc(
            "Maximum number of tokens to generate. Defaults to 16 for text completions, and "
            "to what the context length allows for chat."
        ),
    ] = None
    n: Annotated[Choices | None, doc("Number of completions to generate for each prompt.")] = None
    response_format: Annotated[
        ResponseFormat | None, doc("Format of the output, such as JSON that conforms to a schema.")
    ] = None
    stream_options: Annotated[StreamOptions | None, doc("Options for streaming responses.")] = None
    return_hidden_states: Annotated[
        bool | None, doc("Whether to return hidden states. Requires --enable-return-hidden-states.")
    ] = None
    return_token_ids: Annotated[
        bool | None, doc("Whether to return the token ids of prompt and output in each choice.")
    ] = None
    return_cached_tokens_details: Annotated[
        bool | None, doc("Whether to return the number of cached prompt tokens by cache tier.")
    ] = None
    return_meta_info: Annotated[
        bool | None,
        doc("Whether to return the `meta_info` of /generate with the end of each choice."),
    ] = None
    return_input_ids_in_sglext: Annotated[
        bool | None, doc("Whether to return the prompt token ids in `sglext`.")
    ] = None
    return_output_ids_in_sglext: Annotated[
        bool | None, doc("Whether to return the output token ids in `sglext`.")
    ] = None
    rid: Annotated[Rid | None, doc("Request id, unique among running requests.")] = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content: `text`, or the assistant's `thinking` or `refusal`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """The called function. `arguments` is an object, or the JSON text of one."""

    name: Name
    arguments: str | Json = "{}"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an earlier assistant message."""

    id: CallId = ""
    type: str = "function"
    index: int | None = None
    function: FunctionCall


MessageRole = Literal[
    "system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root"
]


class ChatMessageParam(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation. A final assistant message with `prefix` is continued."""

    role: MessageRole
    content: str | Parts[ContentPart] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: Parts[ToolCall] | None = None
    tool_call_id: CallId | None = None
    function_call: Json | None = None
    prefix: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"]


Verbosity = Literal["low", "medium", "high"]


class ChatBody(CompletionFields):
    """Create a chat completion: the assistant's reply to a conversation."""

    messages: Annotated[
        Messages[ChatMessageParam], Meta(min_length=1, description="The conversation so far.")
    ]
    input_ids: Annotated[
        Annotated[Ids[TokenId], Meta(min_length=1)] | None,
        doc("Prompt as token ids. Used instead of applying the chat template to `messages`."),
    ] = None
    max_completion_tokens: Annotated[
        TokensMax | None,
        doc(
            "Maximum number of tokens to generate, reasoning included. Takes precedence over "
            "`max_tokens`."
        ),
    ] = None
    logprobs: Annotated[
        bool | None, doc("Whether to return the log probability of each output token.")
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None, doc("Number of most likely tokens to return at each position.")
    ] = None
    max_thinking_tokens: Annotated[TokensMax | None, doc("Maximum number of reasoning tokens.")] = (
        None
    )
    continue_final_message: Annotated[
        bool | None, doc("Whether the response continues the final message.")
    ] = None
    chat_template_kwargs: Annotated[
        Json | None, doc("Additional variables for the chat template.")
    ] = None
    reasoning_effort: Annotated[
        Effort | Annotated[float, Meta(ge=0, lt=1)] | None,
        doc(
            "Reasoning effort, passed to the chat template. `none` also sets enable_thinking "
            "and thinking to false."
        ),
    ] = None
    verbosity: Annotated[
        Verbosity | None, doc("Verbosity, passed to the chat template, which may ignore it.")
    ] = None
    return_prompt_token_ids: Annotated[
        bool | None, doc("Whether to return the prompt token ids in each choice.")
    ] = None
    tools: Annotated[Tools[Json] | None, doc("Functions that the model may call.")] = None
    tool_choice: Annotated[
        str | Json | None,
        doc("How the model chooses tools: `auto`, `none`, `required`, or a function by name."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, doc("Whether the model may make several tool calls. Defaults to true.")
    ] = None
    separate_reasoning: Annotated[
        bool | None,
        doc("Whether to return reasoning separately from the content. Defaults to true."),
    ] = None
    stream_reasoning: Annotated[
        bool | None, doc("Whether to stream reasoning as it is generated. Defaults to true.")
    ] = None


class CompletionBody(CompletionFields):
    """Create a text completion."""

    prompt: Annotated[
        str
        | Annotated[
            Ids[str | TokenId | Annotated[Ids[TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ],
        doc("Prompt text or token ids, or a list of either."),
    ]
    logprobs: Annotated[
        TopLogprobs | None, doc("Number of most likely tokens to return log probabilities for.")
    ] = None
    suffix: Annotated[
        str | None, doc("Text after the insertion point, for fill-in-the-middle models.")
    ] = None
    echo: Annotated[bool | None, doc("Whether to include the prompt in the returned text.")] = None
    session_params: Annotated[
        SessionParams | None, doc("Position of the request in a session.")
    ] = None
    best_of: Annotated[
        Choices | None,
        doc(
            "Number of completions to generate, of which the `n` with the highest logprob per"
            " token are returned."
        ),
    ] = None
