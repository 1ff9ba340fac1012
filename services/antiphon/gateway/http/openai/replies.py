"""What OpenAI clients are told: the objects of an answer, whole or in chunks."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.core.logprobs import ChatLogprobs, TextLogprobs
from antiphon.gateway.http.core.token_origins import CachedTokensDetails
from antiphon.gateway.http.native.replies import MetaInfo
from antiphon.wire.base import FinishReason

if TYPE_CHECKING:
    from antiphon.wire.base import Usage

UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    """How much of a prompt was found in the prefix cache."""

    cached_tokens: int


class ThinkingTokens(msgspec.Struct, frozen=True):
    """How much of an answer is thinking, its marks included."""

    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request. `prompt_tokens_details` comes with the cache report.

    `reasoning_tokens` stands beside `completion_tokens_details`, too, as in SGLang.
    """

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ThinkingTokens = ThinkingTokens()
    reasoning_tokens: int = 0


class ChatFinish(StrEnum):
    """Why a choice of a chat ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """It has called, and ended by itself."""
    ABORT = "abort"


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """What is called; `arguments` is, or becomes, the JSON text of an object."""

    name: str | None = None
    arguments: str


class CallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, or a piece of one: only the first piece has the id and the name."""

    id: str | None = None
    index: int
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the assistant said. `content` is null where it said nothing but calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """More of what the assistant says."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | UnsetType = UNSET


class NoDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing more: the choice has ended. Clients of SGLang's read `reasoning_content` here too."""

    reasoning_content: None = None
    hidden_states: list[list[float]] | UnsetType = UNSET


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice holds beside its text, where it was asked for."""

    hidden_states: list[list[float]] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    response_token_ids: list[int] | UnsetType = UNSET
    meta_info: MetaInfo | UnsetType = UNSET


class ChatChoice(Extras, frozen=True, kw_only=True):
    """A whole choice of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    matched_stop: str | int | None


class ChatChunkChoice(Extras, frozen=True, kw_only=True):
    """A piece of a choice of a chat."""

    index: int
    delta: Delta | NoDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    matched_stop: str | int | None = None


class TextChoice(Extras, frozen=True, kw_only=True):
    """A choice of a text completion, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """What SGLang tells beside OpenAI's fields, where it was asked for.

    Attributes:
        cached_tokens_details: Of all prompts together.
        input_ids: Of the prompt; of several prompts, a list for each.
        output_ids: Of the answer; of several choices (`n`, several prompts), a list for each, in
            their order.
    """

    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET
    input_ids: list[int | list[int]] | UnsetType = UNSET
    output_ids: list[int | list[int]] | UnsetType = UNSET


class Metadata(msgspec.Struct, frozen=True):
    """Which weights answered."""

    weight_version: str = "default"


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer of a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    metadata: Metadata
    sglext: Extension | UnsetType = UNSET


class TextReply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer of a text completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody
    metadata: Metadata
    sglext: Extension | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer of a chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    sglext: Extension | UnsetType = UNSET


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer of a text completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody | None = None
    sglext: Extension | UnsetType = UNSET


def usage_body(usage: Usage, *, cached: bool = False) -> UsageBody:
    """Write the tokens as OpenAI does; `cached` adds those of the prefix cache."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=CachedTokens(usage.cached_tokens) if cached else None,
        completion_tokens_details=ThinkingTokens(usage.reasoning_tokens),
        reasoning_tokens=usage.reasoning_tokens,
    )
