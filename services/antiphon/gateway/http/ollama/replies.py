"""Response bodies of the Ollama API: one object, or one for each piece of a stream."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.core.logprobs import TokenLogprob
from antiphon.gateway.http.ollama.schema import OllamaCall

if TYPE_CHECKING:
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.base import Usage

UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message. A tool call is never split."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: tuple[OllamaCall, ...] | UnsetType = UNSET


class OllamaReply(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every response object. The last one has counts and durations.

    Durations are in nanoseconds as measured by the gateway: `total` from receiving the request,
    `prompt_eval` from the end of tokenization to the first text (queueing included), `eval` from
    there to the end. The load duration is 0: no model is loaded for a request.
    """

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OllamaChatReply(OllamaReply, frozen=True, kw_only=True):
    """Response of /api/chat."""

    message: OllamaMessage


class OllamaGenerateReply(OllamaReply, frozen=True, kw_only=True):
    """Response of /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


def now() -> str:
    return written(datetime.now(UTC))


def written(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%S.%fZ}"


def measured(stream: RequestStream, usage: Usage) -> dict[str, int]:
    ended_at = stream.ended_at
    assert ended_at is not None, "the request has ended"
    said_at = ended_at if stream.first_token_at is None else stream.first_token_at
    return {
        "total_duration": _nanoseconds(ended_at - stream.received_at),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(said_at - stream.submitted_at),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(ended_at - said_at),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
