"""What OpenAI clients may send: bodies of chat and text completions, checked into an `Ask`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.ask import Ask, Sampling
from antiphon.gateway.http import fields
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.generate import CHOICES_MAX, LogitBiases
from antiphon.wire.ids import ClientKey
from antiphon.wire.sampling import (
    AdditivePenalty,
    DetailParams,
    MinP,
    RepetitionPenalty,
    Seed,
    StopString,
    StopStrings,
    Temperature,
    TopP,
)
from antiphon.wire.tokenize import ChatMessage

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokensMax = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopK = Annotated[int, Meta(ge=-1)]
Rid = Annotated[str, Meta(min_length=1, max_length=256)]

COMPLETION_TOKENS = 16
_STOPS_MAX = 32
_STOP_IDS_MAX = 1024
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both kinds share. A null is as good as nothing, as in SGLang."""

    model: str | None = None
    max_tokens: TokensMax | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    frequency_penalty: AdditivePenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: TokensMax | None = None
    logit_bias: LogitBiases | None = None
    seed: Seed | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=_STOP_IDS_MAX)] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Rid | None = None


class Part(msgspec.Struct, frozen=True):
    """One piece of a message's content."""

    type: str
    text: str | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    max_completion_tokens: TokensMax | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    continue_final_message: bool | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is text or ids, alone or as the one member of a list.

    `logprobs` is how many of the likeliest tokens are told beside each one.
    """

    logprobs: TopLogprobs | None = None
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class Posted(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was read: the request, how its answer is told, and what was not understood."""

    ask: Ask
    stream: bool
    include_usage: bool
    continuous_usage: bool
    fields_unknown: int


def read_chat(body: bytes) -> Posted:
    """Read the body of a chat completion.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    chat, unknown = fields.read(body, ChatBody, fields.CHAT)
    completing = chat.max_completion_tokens is not None
    continues = bool(chat.continue_final_message)
    if continues and chat.messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant",
            param="continue_final_message",
        )
    return _posted(
        chat,
        unknown,
        Ask(
            door="chat",
            model=chat.model,
            messages=tuple(_message(turn, index) for index, turn in enumerate(chat.messages)),
            continue_final_message=continues,
            tokens_max=chat.max_completion_tokens if completing else chat.max_tokens,
            tokens_field="max_completion_tokens" if completing else "max_tokens",
            model_defaults=True,
        ),
        _chat_details(chat),
    )


def read_completion(body: bytes) -> Posted:
    """Read the body of a text completion.

    Raises:
        InvalidRequest: `param` names the field at fault.
    """
    completion, unknown = fields.read(body, CompletionBody, fields.COMPLETION)
    prompt = _prompt(completion.prompt)
    return _posted(
        completion,
        unknown,
        Ask(
            door="completions",
            model=completion.model,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=None if isinstance(prompt, str) else prompt,
            tokens_max=completion.max_tokens,
            tokens_default=COMPLETION_TOKENS,
        ),
        None
        if completion.logprobs is None
        else DetailParams(logprobs=True, top=completion.logprobs),
    )


def _chat_details(chat: ChatBody) -> DetailParams | None:
    if chat.logprobs:
        return DetailParams(logprobs=True, top=chat.top_logprobs or 0)
    if chat.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _posted(body: Body, unknown: int, ask: Ask, details: DetailParams | None) -> Posted:
    options = body.stream_options or StreamOptions()
    return Posted(
        ask=msgspec.structs.replace(
            ask,
            choices=body.n or 1,
            sampling=_sampling(body, details),
            stop=_stop(body, token_texts=details is not None),
            key=None if body.rid is None else ClientKey(body.rid),
        ),
        stream=bool(body.stream),
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        fields_unknown=unknown,
    )


def _sampling(body: Body, details: DetailParams | None) -> Sampling:
    if body.top_k == 0:
        raise InvalidRequest("top_k: -1 keeps every token, else it is 1 or more", param="top_k")
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=body.repetition_penalty,
        tokens_min=body.min_tokens or 0,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        details=details,
    )


def _stop(body: Body, *, token_texts: bool) -> StopStrings:
    strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(strings) > _STOPS_MAX:
        raise InvalidRequest(
            f"stop has {len(strings)} strings; {_STOPS_MAX} are allowed", param="stop"
        )
    return StopStrings(
        strings=tuple(strings),
        include=bool(body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        token_texts=token_texts,
    )


def _message(turn: Turn, index: int) -> ChatMessage:
    at = f"messages[{index}]"
    if turn.role in ("tool", "function"):
        raise Unsupported("tools are not supported", param=f"{at}.role")
    for name, value in (("tool_calls", turn.tool_calls), ("function_call", turn.function_call)):
        if value:
            raise Unsupported("tools are not supported", param=f"{at}.{name}")
    if turn.reasoning_content:
        raise Unsupported("reasoning is not supported", param=f"{at}.reasoning_content")
    if turn.prefix:
        raise Unsupported("say continue_final_message", param=f"{at}.prefix")
    return ChatMessage(role=turn.role, content=_content(turn, at), name=turn.name)


def _content(turn: Turn, at: str) -> str:
    if isinstance(turn.content, str):
        return turn.content
    if turn.content is None:
        if turn.role == "assistant":
            return ""
        raise InvalidRequest("a message needs content", param=f"{at}.content")
    # Joined by a blank, as SGLang does for templates that take plain text.
    return " ".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(turn.content))


def _part(part: Part, at: str) -> str:
    if part.type != "text":
        raise Unsupported(f"content of type '{part.type}' is not supported", param=f"{at}.type")
    if part.text is None:
        raise InvalidRequest("a text part needs text", param=f"{at}.text")
    return part.text


def _prompt(prompt: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    ids = tuple(item for item in prompt if isinstance(item, int))
    if len(ids) == len(prompt):
        return ids
    if len(prompt) > 1:
        raise Unsupported("more than one prompt in a request is not supported", param="prompt")
    only = prompt[0]
    assert not isinstance(only, int)
    return only if isinstance(only, str) else tuple(only)
