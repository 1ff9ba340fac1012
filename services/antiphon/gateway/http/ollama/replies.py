"""What Ollama's clients are told of an answer: one object, or one for each piece of it."""

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
    """What the assistant said. Calls are told whole."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: tuple[OllamaCall, ...] | UnsetType = UNSET


class OllamaReply(msgspec.Struct, frozen=True, kw_only=True):
    """What stands on every object of an answer; counts and durations are on the last one.

    Durations are in nanoseconds, as this gateway has measured them: `total` from when the request
    was read, `prompt_eval` from when it was encoded to its first text, waiting in the queue
    included, and `eval` from there to its end. Nothing is loaded for a request.
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
    """Of a chat."""

    message: OllamaMessage


class OllamaGenerateReply(OllamaReply, frozen=True, kw_only=True):
    """Of a prompt."""

    response: str
    thinking: str | UnsetType = UNSET


def now() -> str:
    """The time, as Ollama writes it."""
    return written(datetime.now(UTC))


def written(time: datetime) -> str:
    """A time of UTC, as Ollama writes it."""
    return f"{time:%Y-%m-%dT%H:%M:%S.%fZ}"


def measured(stream: RequestStream, usage: Usage) -> dict[str, int]:
    """The counts and durations of a request that has ended."""
    ended_at = stream.ended_at
    assert ended_at is not None, "all that is told of it was said"
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
