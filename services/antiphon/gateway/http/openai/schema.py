"""Bodies of chat and text completions, and of their replies, complete or as stream chunks.

These structs define parsing, the OpenAPI document and the reference page. A null in a request is
equivalent to an omitted field, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from antiphon.gateway.http.core.fields import COMMON, NOTHING, UnsupportedField
from antiphon.gateway.http.core.image_options import ImageEmbeds, ImageOptions
from antiphon.gateway.http.core.limits import (
    CallId,
    Choices,
    Ids,
    Json,
    Messages,
    Name,
    Parts,
    PromptIds,
    Rid,
    TokensMax,
    Tools,
)
from antiphon.gateway.http.core.logprobs import ChatLogprobs, TextLogprobs, TopLogprobs
from antiphon.gateway.http.core.meta_info import CachedTokensDetails, MetaInfo
from antiphon.gateway.http.core.sampling_fields import SglangSamplingFields
from antiphon.gateway.requests.generation_request import MediumSource
from antiphon.gateway.sessions import SessionParams
from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.media import Detail
from antiphon.wire.namespaces import CacheSaltText
from antiphon.wire.sampling import Priority, Seed, TokenId
from antiphon.wire.tokenize import ChatMessage, MessagePart, MessageToolCall

COMPLETION_TOKENS = 16
"""Default of `max_tokens` of a text completion."""
PROMPTS_MAX = 256


class StreamOptions(msgspec.Struct, frozen=True):
    """Options for streaming responses."""

    include_usage: bool | None = None
    """Whether to send a final chunk with the token usage of the request."""
    continuous_usage_stats: bool | None = None
    """Whether to include the token usage so far in every chunk."""


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

    model: str | None = None
    """Name of the served model. Optional."""
    min_tokens: TokensMax | None = None
    """Minimum number of tokens to generate."""
    seed: Seed | None = None
    """Seed for reproducible sampling."""
    custom_logit_processor: str | None = None
    """Name of a registered logits processor. Serialized code is rejected."""
    stream: bool | None = None
    """Whether to stream the response as it is generated."""
    priority: Priority | None = None
    """Scheduling priority; higher runs first. Requires --enable-priority-scheduling."""
    cache_salt: CacheSaltText | None = None
    """Restricts prefix cache sharing to requests with the same salt."""
    extra_key: CacheSaltText | None = None
    """Like `cache_salt`; both must match."""


class CompletionFields(OpenAiFields):
    max_tokens: TokensMax | None = None
    """Maximum number of tokens to generate. Defaults to 16 for text completions, and to what the
    context length allows for chat."""
    n: Choices | None = None
    """Number of completions to generate for each prompt."""
    response_format: ResponseFormat | None = None
    """Format of the output, such as JSON that conforms to a schema."""
    stream_options: StreamOptions | None = None
    """Options for streaming responses."""
    return_hidden_states: bool | None = None
    """Whether to return hidden states. Requires --enable-return-hidden-states."""
    return_token_ids: bool | None = None
    """Whether to return the token ids of prompt and output in each choice."""
    return_cached_tokens_details: bool | None = None
    """Whether to return the number of cached prompt tokens by cache tier."""
    return_meta_info: bool | None = None
    """Whether to return the `meta_info` of /generate with the end of each choice."""
    return_input_ids_in_sglext: bool | None = None
    """Whether to return the prompt token ids in `sglext`."""
    return_output_ids_in_sglext: bool | None = None
    """Whether to return the output token ids in `sglext`."""
    rid: Rid | None = None
    """Request id, unique among running requests."""


_SHOWN = ("image_url", "image_embeds", "video_url", "input_audio", "audio_url")


class ImageUrl(msgspec.Struct, frozen=True):
    """An image: an http, https, `data:` or file URL.

    `low` limits its tokens in models that scale or cut images by their size; `high` is the model's
    maximum, whatever the server's default. They change nothing in models that scale all images to
    one size.
    """

    url: str
    detail: Detail | None = None


class VideoUrl(msgspec.Struct, frozen=True):
    """A video: an http, https, `data:` or file URL, or `data:video/jpeg;base64,` and its frames."""

    url: str


class InputAudio(msgspec.Struct, frozen=True):
    """An audio file, in base64."""

    data: str
    format: str = ""
    """Accepted and not needed: the format is read from the file, which may be WAV, FLAC, MP3, Ogg,
    WebM or MP4."""


class AudioUrl(msgspec.Struct, frozen=True):
    """An audio file: an http, https, `data:` or file URL."""

    url: str


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message: `text`, a medium, or what an assistant wrote.

    Media are `image_url`, `video_url`, `input_audio` and `audio_url`. What an assistant wrote is
    `thinking`, or a `refusal`. A medium that was sent with a `uuid` may be sent again by that
    alone, for some time. A part of type `image_embeds` has the embedding of an image in its place.
    """

    type: str
    image_url: ImageUrl | str | None = None
    image_embeds: ImageEmbeds | None = None
    video_url: VideoUrl | str | None = None
    input_audio: InputAudio | None = None
    audio_url: AudioUrl | str | None = None
    uuid: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
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


SESSION_PARAMS = UnsupportedField(
    "not supported by chat completions, which carry the whole conversation; use /generate"
    " or /v1/completions",
    NOTHING,
)


class ChatBody(CompletionFields):
    """Create a chat completion: the assistant's reply to a conversation."""

    messages: Annotated[Messages[ChatMessageParam], Meta(min_length=1)]
    """The conversation so far."""
    input_ids: PromptIds | None = None
    """Prompt as token ids. Used instead of applying the chat template to `messages`."""
    max_completion_tokens: TokensMax | None = None
    """Maximum number of tokens to generate, reasoning included. Takes precedence over
    `max_tokens`."""
    logprobs: bool | None = None
    """Whether to return the log probability of each output token."""
    top_logprobs: TopLogprobs | None = None
    """Number of most likely tokens to return at each position."""
    max_thinking_tokens: TokensMax | None = None
    """Maximum number of reasoning tokens."""
    continue_final_message: bool | None = None
    """Whether the response continues the final message."""
    chat_template_kwargs: Json | None = None
    """Additional variables for the chat template."""
    mm_processor_kwargs: ImageOptions | None = None
    """Numbers of pixels between which media are scaled, and of frames of videos."""
    reasoning_effort: Effort | Annotated[float, Meta(ge=0, lt=1)] | None = None
    """Reasoning effort, passed to the chat template. `none` also sets enable_thinking and thinking
    to false."""
    verbosity: Verbosity | None = None
    """Verbosity, passed to the chat template, which may ignore it."""
    return_prompt_token_ids: bool | None = None
    """Whether to return the prompt token ids in each choice."""
    tools: Tools[Json] | None = None
    """Functions that the model may call."""
    tool_choice: str | Json | None = None
    """How the model chooses tools: `auto`, `none`, `required`, or a function by name."""
    parallel_tool_calls: bool | None = None
    """Whether the model may make several tool calls. Defaults to true."""
    separate_reasoning: bool | None = None
    """Whether to return reasoning separately from the content. Defaults to true."""
    stream_reasoning: bool | None = None
    """Whether to stream reasoning as it is generated. Defaults to true."""

    UNSUPPORTED: ClassVar = {
        **COMMON,
        "session_params": SESSION_PARAMS,
        "functions": UnsupportedField("use tools", NOTHING),
        "function_call": UnsupportedField("use tool_choice", ("none", "auto")),
        "modalities": UnsupportedField("this model generates text only", (["text"], [])),
        "audio": UnsupportedField("this model generates text only"),
        "prediction": UnsupportedField("predicted outputs are not supported"),
        "web_search_options": UnsupportedField("web search is not supported"),
        "store": UnsupportedField("chat completions are not stored; use /v1/responses", (False,)),
        "service_tier": UnsupportedField("service tiers are not supported", ("auto", "default")),
    }


class CompletionBody(CompletionFields):
    """Create a text completion."""

    prompt: str | Annotated[Ids[str | TokenId | PromptIds], Meta(min_length=1)]
    """Prompt text or token ids, or a list of either."""
    logprobs: TopLogprobs | None = None
    """Number of most likely tokens to return log probabilities for."""
    suffix: str | None = None
    """Text after the insertion point, for fill-in-the-middle models."""
    echo: bool | None = None
    """Whether to include the prompt in the returned text."""
    session_params: SessionParams | None = None
    """Position of the request in a session."""
    best_of: Choices | None = None
    """Number of completions to generate, of which the `n` with the highest logprob per token are
    returned."""

    UNSUPPORTED: ClassVar = {
        **COMMON,
        "max_thinking_tokens": UnsupportedField(
            "only supported by /v1/chat/completions and /generate"
        ),
    }


def conversation(turns: Sequence[ChatMessageParam]) -> tuple[ChatMessage, ...]:
    last = len(turns) - 1
    for index, turn in enumerate(turns):
        if turn.prefix and (index != last or turn.role != "assistant"):
            raise InvalidRequest(
                "only a final assistant message can be continued",
                param=f"messages[{index}].prefix",
            )
    before, messages = 0, list[ChatMessage]()
    for index, turn in enumerate(turns):
        messages.append(_message(turn, f"messages[{index}]", before))
        before += len(_images(turn, ""))
    return tuple(messages)


def images(turns: Sequence[ChatMessageParam]) -> tuple[MediumSource, ...]:
    """The media of all messages, in order."""
    return tuple(
        image for index, turn in enumerate(turns) for image in _images(turn, f"messages[{index}]")
    )


def _images(turn: ChatMessageParam, at: str) -> list[MediumSource]:
    return [
        _medium(part, f"{at}.content[{i}]")
        for i, part in enumerate(turn.content if isinstance(turn.content, list) else ())
        if part.type in _SHOWN
    ]


def _medium(part: ContentPart, at: str) -> MediumSource:
    if part.image_embeds is not None and part.type == "image_embeds":
        return part.image_embeds.source(f"{at}.image_embeds")
    param = f"{at}.{part.type}"
    match part.type:
        case "video_url":
            return MediumSource(_url(part), param, part.uuid, video=True)
        case "input_audio" | "audio_url":
            return MediumSource(_url(part), param, part.uuid, sound=True)
        case _:
            return MediumSource(_url(part), param, part.uuid, _detail(part))


def _url(part: ContentPart) -> str:
    """The URL of a medium, or its base64; empty if the part has none."""
    match part.type:
        case "input_audio":
            return "" if part.input_audio is None else part.input_audio.data
        case "audio_url":
            medium = part.audio_url
        case "video_url":
            medium = part.video_url
        case _:
            medium = part.image_url
    return medium or "" if isinstance(medium, str | None) else medium.url


def _detail(part: ContentPart) -> Detail | None:
    return part.image_url.detail if isinstance(part.image_url, ImageUrl) else None


def begins_answer(turns: Sequence[ChatMessageParam]) -> bool:
    return bool(turns and turns[-1].prefix)


def _message(turn: ChatMessageParam, at: str, images_before: int) -> ChatMessage:
    if turn.role == "function":
        raise Unsupported("use role tool", param=f"{at}.role")
    if turn.function_call:
        raise Unsupported("use tool_calls", param=f"{at}.function_call")
    return ChatMessage(
        role=turn.role,
        content=_content(turn, at),
        name=turn.name,
        reasoning_content=turn.reasoning_content or _reasoning_of(turn),
        tool_calls=tuple(
            MessageToolCall(
                id=call.id, name=call.function.name, arguments=_json(call.function.arguments)
            )
            for call in turn.tool_calls or ()
        ),
        tool_call_id=turn.tool_call_id,
        without_content=turn.content is None,
        parts=_parts(turn, at, images_before),
    )


def _parts(turn: ChatMessageParam, at: str, images_before: int) -> tuple[MessagePart, ...]:
    """Text and images of a message with images; none of others."""
    if not isinstance(turn.content, list) or not _images(turn, at):
        return ()
    if turn.role not in ("user", "tool"):
        i = next(i for i, part in enumerate(turn.content) if part.type in _SHOWN)
        raise Unsupported(
            f"media are supported in messages of the roles user and tool, not {turn.role}",
            param=f"{at}.content[{i}]",
        )
    parts: list[MessagePart] = []
    for i, part in enumerate(turn.content):
        if part.type in _SHOWN:
            parts.append(MessagePart(medium=images_before))
            images_before += 1
        else:
            parts.append(MessagePart(text=_part(part, turn, f"{at}.content[{i}]")))
    return tuple(parts)


def _content(turn: ChatMessageParam, at: str) -> str:
    if isinstance(turn.content, str):
        return turn.content
    if turn.content is None:
        if turn.role == "assistant":
            return ""
        raise InvalidRequest("a message requires content", param=f"{at}.content")
    parts = enumerate(turn.content)
    texts = [
        _part(part, turn, f"{at}.content[{i}]")
        for i, part in parts
        if not (_thinks(part, turn) or _shows(part, f"{at}.content[{i}]"))
    ]
    # Joined by a space, as in SGLang for templates that take plain text.
    return " ".join(texts)


def _part(part: ContentPart, turn: ChatMessageParam, at: str) -> str:
    refuses = part.type == "refusal" and turn.role == "assistant"
    if part.type != "text" and not refuses:
        raise Unsupported(f"content of type '{part.type}' is not supported", param=f"{at}.type")
    text = part.refusal if refuses else part.text
    if text is None:
        raise InvalidRequest(
            f"a content part of type {part.type} requires {part.type}", param=f"{at}.{part.type}"
        )
    return text


def _reasoning_of(turn: ChatMessageParam) -> str | None:
    parts = turn.content if isinstance(turn.content, list) else []
    return "\n".join(part.thinking or "" for part in parts if _thinks(part, turn)) or None


def _shows(part: ContentPart, at: str) -> bool:
    if part.type not in _SHOWN:
        return False
    embedded = part.type == "image_embeds"
    if part.image_embeds is None if embedded else not _url(part) and part.uuid is None:
        text = f"a content part of type {part.type} requires {part.type}"
        raise InvalidRequest(text, param=f"{at}.{part.type}")
    return True


def _thinks(part: ContentPart, turn: ChatMessageParam) -> bool:
    return part.type == "thinking" and turn.role == "assistant"


def _json(arguments: str | dict[str, msgspec.Raw]) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return msgspec.json.encode(arguments).decode()


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Number of prompt tokens read from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Number of reasoning tokens, delimiters included."""

    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Token usage of a request. `prompt_tokens_details` is present if the cache report is enabled.

    `reasoning_tokens` is also in `completion_tokens_details`, as in SGLang.
    """

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()
    reasoning_tokens: int = 0


class ChatFinish(StrEnum):
    """Why a chat choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """The model called tools and ended its turn."""
    ABORT = "abort"


class ToolCallFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The called function. `arguments` is the JSON text of an object, complete or in fragments."""

    name: str | None = None
    arguments: str


class ToolCallReply(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, or a fragment of one. Only the first fragment has the id and the name."""

    id: str | None = None
    index: int
    type: Literal["function"] = "function"
    function: ToolCallFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message generated by the model. `content` is null if the message has only tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Content added to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | UnsetType = UNSET


class EmptyDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Delta of a choice's last chunk: empty. SGLang clients read `reasoning_content` from it."""

    reasoning_content: None = None
    hidden_states: list[list[float]] | UnsetType = UNSET


class ChoiceExtras(msgspec.Struct, frozen=True, kw_only=True):
    """Optional fields of a choice, present if requested."""

    hidden_states: list[list[float]] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    response_token_ids: list[int] | UnsetType = UNSET
    meta_info: MetaInfo | UnsetType = UNSET


class ChatChoice(ChoiceExtras, frozen=True, kw_only=True):
    """A chat completion choice."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    matched_stop: str | int | None


class ChatChunkChoice(ChoiceExtras, frozen=True, kw_only=True):
    """A chunk of a chat completion choice."""

    index: int
    delta: Delta | EmptyDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    matched_stop: str | int | None = None


class TextChoice(ChoiceExtras, frozen=True, kw_only=True):
    """A text completion choice, or a chunk of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's extension fields, present if requested."""

    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET
    """Cached tokens by tier, summed over all prompts."""
    input_ids: list[int | list[int]] | UnsetType = UNSET
    """Token ids of the prompt; one list per prompt if there are several."""
    output_ids: list[int | list[int]] | UnsetType = UNSET
    """Token ids of the output; one list per choice if there are several."""


class Metadata(msgspec.Struct, frozen=True):
    """Weight version that generated the response."""

    weight_version: str = "default"


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """A completion."""

    id: str
    object: str = ""
    created: int
    model: str
    choices: Sequence[ChatChoice | TextChoice]
    usage: UsageBody
    metadata: Metadata
    sglext: Extension | UnsetType = UNSET


class ChatReply(CompletionReply, frozen=True, kw_only=True):
    """A chat completion."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class TextReply(CompletionReply, frozen=True, kw_only=True):
    """A text completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class OpenAiChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a streamed completion."""

    id: str
    object: Literal["chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: Sequence[ChatChunkChoice | TextChoice]
    usage: UsageBody | None = None
    sglext: Extension | UnsetType = UNSET


def usage_body(usage: Usage, *, cached: bool = False) -> UsageBody:
    """Convert token counts to OpenAI's format; `cached` adds `prompt_tokens_details`."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens) if cached else None,
        completion_tokens_details=CompletionTokensDetails(usage.reasoning_tokens),
        reasoning_tokens=usage.reasoning_tokens,
    )
