"""Bodies of /v1/responses and of its replies. A null is equivalent to an omitted field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.fields import COMMON, UnsupportedField
from antiphon.gateway.http.core.image_options import ImageOptions
from antiphon.gateway.http.core.limits import Json, Messages, TokensMax, Tools
from antiphon.gateway.http.core.logprobs import TopLogprobs
from antiphon.gateway.http.openai.responses.items import Item, OutputItem
from antiphon.gateway.http.openai.responses.tools import ResponseTool
from antiphon.gateway.http.openai.schema import SESSION_PARAMS, Effort, OpenAiFields, Verbosity

if TYPE_CHECKING:
    from antiphon.wire.base import Usage


Label = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)]


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


_ELSEWHERE = UnsupportedField("use /generate, /v1/chat/completions or /v1/completions", (False,))


class ResponsesBody(OpenAiFields):
    """Create a response: text, reasoning and tool calls for an input."""

    input: str | Messages[Json]
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
    tools: Tools[Json] | None = None
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
    mm_processor_kwargs: ImageOptions | None = None
    """Numbers of pixels between which images are scaled."""

    UNSUPPORTED: ClassVar = {
        **COMMON,
        "session_params": SESSION_PARAMS,
        "return_cached_tokens_details": UnsupportedField(
            "cached tokens are reported in usage", (False,)
        ),
        "max_thinking_tokens": UnsupportedField(
            "only supported by /v1/chat/completions and /generate"
        ),
        **dict.fromkeys(
            ("rid", "request_id"), UnsupportedField("responses are identified by their id")
        ),
        "conversation": UnsupportedField("conversations are not stored; use previous_response_id"),
        "prompt": UnsupportedField("stored prompts are not supported; use input and instructions"),
        "context_management": UnsupportedField("context compaction is not supported", ([],)),
        "max_tool_calls": UnsupportedField("applies to built-in tools, which are not supported"),
        **dict.fromkeys(
            ("max_tokens", "max_completion_tokens"), UnsupportedField("use max_output_tokens")
        ),
        "n": UnsupportedField("a response has exactly one output", (1,)),
        "response_format": UnsupportedField("use text.format", ({"type": "text"},)),
        "reasoning_effort": UnsupportedField("use reasoning.effort"),
        **dict.fromkeys(("return_hidden_states", "return_meta_info"), _ELSEWHERE),
        **dict.fromkeys(("return_input_ids_in_sglext", "return_output_ids_in_sglext"), _ELSEWHERE),
        "moderation": UnsupportedField("moderation is not supported"),
        "image": UnsupportedField("this model does not generate images"),
        "access_programs": UnsupportedField("access programs are not supported"),
        "prompt_cache_retention": UnsupportedField(
            "cached prefixes are kept as long as there is space", ("in_memory",)
        ),
        "prompt_cache_options": UnsupportedField("prefix caching is automatic", ({},)),
    }


State = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
TERMINAL = ("completed", "incomplete", "failed", "cancelled")


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Number of input tokens read from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Number of reasoning tokens in the output, delimiters included."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token usage of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """The request's reasoning options."""

    effort: Effort | None = None
    summary: str | None = None


class ResponseText(msgspec.Struct, frozen=True, kw_only=True):
    """The request's text options."""

    format: Json
    verbosity: Verbosity = "medium"


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """A response. `temperature` and `top_p` are the values that were used."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: State
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list[OutputItem])
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | Json
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the input items of a response."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Number of input tokens of a response."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation that a response was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
