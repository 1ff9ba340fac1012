"""What clients of /v1/responses are told: the response, and lists of its items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.openai.responses.items import Item, OutputItem
from antiphon.gateway.http.openai.responses.tools import ResponseTool
from antiphon.gateway.http.openai.schema import Effort, Json, Verbosity

if TYPE_CHECKING:
    from antiphon.wire.base import Usage

State = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
TERMINAL = ("completed", "incomplete", "failed", "cancelled")


class FailedBecause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteBecause(msgspec.Struct, frozen=True):
    """Why a response ends before its end."""

    reason: Literal["max_output_tokens"]


class InputDetails(msgspec.Struct, frozen=True):
    """How much of the input was found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """How much of the output was thinking, its marks included."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ReasoningSaid(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of the thinking."""

    effort: Effort | None = None
    summary: str | None = None


class TextSaid(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of the text; a format as it was sent."""

    format: Json
    verbosity: Verbosity = "medium"


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """A response. Temperature and top_p are those that were used."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: State
    background: bool
    error: FailedBecause | None = None
    incomplete_details: IncompleteBecause | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list[OutputItem])
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSaid
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextSaid
    tool_choice: str | Json
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in TERMINAL


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the items that a response was made from."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens the input of a response has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A response is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


def response_usage(usage: Usage) -> ResponseUsage:
    """Write the tokens as responses have them."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
