"""Response bodies of /v1/responses: responses and lists of items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.core.generation_fields import Json
from antiphon.gateway.http.openai.responses.items import Item, OutputItem
from antiphon.gateway.http.openai.responses.tools import ResponseTool
from antiphon.gateway.http.openai.schema import Effort, Verbosity

if TYPE_CHECKING:
    from antiphon.wire.base import Usage

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
