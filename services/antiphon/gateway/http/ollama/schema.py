"""The bodies of /api/chat and /api/generate: every field, its bounds and its meaning.

A null is as good as nothing. Options that are not here say how Ollama loads a model (`num_ctx`,
`num_gpu`, ...): that is the operator's to say, and they are ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import CallId, Messages, Name, Parts, Tools
from antiphon.gateway.http.openai.schema import Json, Stops, TopLogprobs
from antiphon.wire.sampling import (
    AdditivePenalty,
    MinP,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopP,
)

TokensMost = Annotated[int, Meta(ge=-2, le=2**31 - 1)]


def _is(meaning: str) -> Meta:
    return Meta(description=meaning)


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when an answer ends."""

    num_predict: Annotated[
        TokensMost | None, _is("Longest answer; below 0, or unsaid: what the context leaves.")
    ] = None
    temperature: Annotated[
        Temperature | None, _is("0 takes the likeliest token; 1 is the model as it is.")
    ] = None
    top_k: Annotated[int | None, _is("Draws from so many; 0 and below: from all.")] = None
    top_p: Annotated[TopP | None, _is("Draws from the likeliest tokens up to this mass.")] = None
    min_p: Annotated[
        MinP | None, _is("Draws from tokens at least so likely, as a part of the likeliest.")
    ] = None
    repeat_penalty: Annotated[
        RepetitionPenalty | None, _is("Divides the logits of tokens that were drawn.")
    ] = None
    presence_penalty: Annotated[
        AdditivePenalty | None, _is("Taken off a logit once its token was drawn.")
    ] = None
    frequency_penalty: Annotated[
        AdditivePenalty | None, _is("Taken off a logit for each time its token was drawn.")
    ] = None
    seed: Annotated[Seed | None, _is("The same draws each time; -1: others each time.")] = None
    stop: Annotated[Stops | None, _is("Texts that end the answer, and are left out of it.")] = None
    repeat_last_n: Annotated[
        int | None, _is("-1, or 64 which Ollama takes unsaid: penalties are of the whole answer.")
    ] = None
    typical_p: Annotated[float | None, _is("Only 1 is served.")] = None
    tfs_z: Annotated[float | None, _is("Only 1 is served.")] = None
    mirostat: Annotated[int | None, _is("Only 0 is served.")] = None
    penalize_newline: Annotated[bool | None, _is("Only true is served.")] = None


class OllamaFunction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was called; `arguments` is an object, `index` counts the calls of an answer."""

    index: int | None = None
    name: Name
    arguments: Json | None = None


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of a tool, of an earlier turn or of an answer."""

    id: CallId | None = None
    function: OllamaFunction


class OllamaTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Parts[str] | None = None
    tool_calls: Parts[OllamaCall] | None = None
    tool_name: Name | None = None
    tool_call_id: CallId | None = None


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """What /api/chat and /api/generate share."""

    model: Annotated[str | None, _is("The served model, with `:latest` or not; null takes it.")] = (
        None
    )
    format: Annotated[
        Literal["", "json"] | Json | None, _is("`json`, or the JSON schema of the answer.")
    ] = None
    options: Annotated[OllamaOptions | None, _is("How tokens are drawn.")] = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None,
        _is("Whether the model thinks first, for the chat template; or how much."),
    ] = None
    stream: Annotated[bool | None, _is("Whether to stream the answer; true by default.")] = None
    keep_alive: Annotated[
        str | float | None, _is("The model stays loaded, so there is nothing to keep.")
    ] = None
    logprobs: Annotated[
        bool | None, _is("Whether to return the log probability of each token.")
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None, _is("Number of most likely tokens to return at each position.")
    ] = None
    truncate: Annotated[
        bool | None, _is("false: a prompt that is too long is refused, never truncated.")
    ] = None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[
        Messages[OllamaTurn] | None,
        _is("The conversation; a last one of the assistant is continued. None: the model is ready"),
    ] = None
    tools: Annotated[Tools[Json] | None, _is("Functions that the model may call.")] = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/generate."""

    prompt: Annotated[str | None, _is("What the user says. Nothing: the model is ready.")] = None
    suffix: Annotated[
        str | None,
        _is("What comes after a gap behind the prompt; the answer fills it, without a template."),
    ] = None
    system: Annotated[str | None, _is("A message of the system before it.")] = None
    raw: Annotated[bool | None, _is("The prompt is the whole text, without a template.")] = None
