"""The bodies of chat and text completions: every field, its bounds and its meaning.

The reader, the OpenAPI document and the table in the docs are all made from these structs. A null
is as good as nothing, as in SGLang.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import CallId, Ids, Messages, Name, Parts, Tools
from antiphon.gateway.http.core.structured_output import Schema
from antiphon.gateway.http.native.schema import SessionParams
from antiphon.wire.digests import CacheSaltText
from antiphon.wire.generate import CHOICES_MAX, LogitBiases
from antiphon.wire.sampling import (
    STOPS_MAX,
    AdditivePenalty,
    MinP,
    Priority,
    RepetitionPenalty,
    Seed,
    StopPattern,
    StopString,
    Temperature,
    TopP,
)

COMPLETION_TOKENS = 16
"""How long a text completion gets that says nothing."""
PROMPTS_MAX = 256
_STOP_IDS_MAX = 1024

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokensMax = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopK = Annotated[int, Meta(ge=-1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
Rid = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=STOPS_MAX)]
StopPatterns = StopPattern | Annotated[list[StopPattern], Meta(max_length=STOPS_MAX)]
StopIds = Annotated[list[TokenId], Meta(max_length=_STOP_IDS_MAX)]
Json = dict[str, msgspec.Raw]


def _is(meaning: str) -> Meta:
    return Meta(description=meaning)


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells beside its text."""

    include_usage: Annotated[bool | None, _is("A last chunk tells the tokens of all of it.")] = None
    continuous_usage_stats: Annotated[bool | None, _is("Every chunk tells the tokens so far.")] = (
        None
    )


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON schema with a name. The name and the description change nothing."""

    name: str | None = None
    description: str | None = None
    schema: Json
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer. A structural tag is of the newer kind, `format`, or the older one."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Json | None = None
    structures: Tools[Json] | None = None
    triggers: Tools[str] | None = None


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What every kind of body says of how an answer is made."""

    model: Annotated[str | None, _is("The served model; null takes it.")] = None
    temperature: Annotated[
        Temperature | None, _is("0 takes the likeliest token; 1 is the model as it is.")
    ] = None
    top_p: Annotated[TopP | None, _is("Draws from the likeliest tokens up to this mass.")] = None
    top_k: Annotated[TopK | None, _is("Draws from so many; -1 from all.")] = None
    min_p: Annotated[
        MinP | None, _is("Draws from tokens at least so likely, as a part of the likeliest.")
    ] = None
    frequency_penalty: Annotated[
        AdditivePenalty | None, _is("Taken off a logit for each time its token was drawn.")
    ] = None
    presence_penalty: Annotated[
        AdditivePenalty | None, _is("Taken off a logit once its token was drawn.")
    ] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, _is("Divides the logits of tokens that were drawn.")
    ] = None
    min_tokens: Annotated[TokensMax | None, _is("No end token is drawn before.")] = None
    logit_bias: Annotated[LogitBiases | None, _is("Added to the logits of single tokens.")] = None
    seed: Annotated[Seed | None, _is("The same draws each time; each choice has its own.")] = None
    stop: Annotated[Stops | None, _is("Texts that end the answer, and are left out of it.")] = None
    stop_regex: Annotated[
        StopPatterns | None,
        _is("Regular expressions that end it; no look-around, no anchors."),
    ] = None
    stop_token_ids: Annotated[
        StopIds | None, _is("Tokens that end it, beside the model's own.")
    ] = None
    ignore_eos: Annotated[bool | None, _is("The model's own end tokens do not end it.")] = None
    no_stop_trim: Annotated[bool | None, _is("Leaves the stop in the text.")] = None
    skip_special_tokens: Annotated[
        bool | None, _is("Special tokens write no text; true unless said.")
    ] = None
    regex: Annotated[str | None, _is("The answer matches this as a whole.")] = None
    ebnf: Annotated[str | None, _is("The answer is a `root` of these rules.")] = None
    json_schema: Annotated[Schema | None, _is("The answer is JSON of this schema.")] = None
    custom_logit_processor: Annotated[
        str | None, _is("The name of a processor that is registered; code is refused.")
    ] = None
    custom_params: Annotated[Json | None, _is("The parameters of that processor.")] = None
    stream: Annotated[bool | None, _is("Tells the answer as it is made.")] = None
    priority: Annotated[
        Priority | None, _is("The higher goes first, where the operator goes by priorities.")
    ] = None
    cache_salt: Annotated[
        CacheSaltText | None, _is("Cached prefixes are shared with those who say the same.")
    ] = None
    extra_key: Annotated[CacheSaltText | None, _is("Likewise; both must be the same.")] = None


class Body(Sampled, frozen=True, kw_only=True):
    """What chat and text completions share."""

    max_tokens: Annotated[
        TokensMax | None, _is("Longest answer. 16 for a text, what the context leaves for a chat.")
    ] = None
    n: Annotated[Choices | None, _is("How many answers to each prompt.")] = None
    response_format: Annotated[ResponseFormat | None, _is("The form of the answer.")] = None
    stream_options: Annotated[StreamOptions | None, _is("What a stream tells besides.")] = None
    return_hidden_states: Annotated[
        bool | None, _is("Tells the state that each token followed from, if the operator allows.")
    ] = None
    return_token_ids: Annotated[
        bool | None, _is("Tells the ids of prompt and answer in each choice.")
    ] = None
    return_cached_tokens_details: Annotated[
        bool | None, _is("Tells where the tokens of the prompt were that were cached.")
    ] = None
    return_meta_info: Annotated[
        bool | None, _is("Tells in each choice, at its end, the `meta_info` of /generate.")
    ] = None
    return_input_ids_in_sglext: Annotated[
        bool | None, _is("Tells the ids of the prompt in `sglext`.")
    ] = None
    return_output_ids_in_sglext: Annotated[
        bool | None, _is("Tells the ids of the answer in `sglext`.")
    ] = None
    rid: Annotated[Rid | None, _is("The client's name for it, unique while it runs.")] = None


class ContentPart(msgspec.Struct, frozen=True):
    """One piece of a message's content: a `text`, or the assistant's `thinking` or `refusal`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """What was called; `arguments` is an object, or the JSON text of one."""

    name: Name
    arguments: str | Json = "{}"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an earlier turn of the assistant."""

    id: CallId = ""
    type: str = "function"
    index: int | None = None
    function: FunctionCall


MessageRole = Literal[
    "system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root"
]


class ChatMessageParam(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation; the answer goes on from a last one with `prefix`."""

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


class ChatBody(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        Messages[ChatMessageParam], Meta(min_length=1, description="The conversation.")
    ]
    input_ids: Annotated[
        Annotated[Ids[TokenId], Meta(min_length=1)] | None,
        _is("The prompt as token ids, in place of what the template makes of the messages."),
    ] = None
    max_completion_tokens: Annotated[
        TokensMax | None, _is("The newer name of max_tokens; it comes first.")
    ] = None
    logprobs: Annotated[
        bool | None, _is("Whether to return the log probability of each output token.")
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None, _is("Number of most likely tokens to return at each position.")
    ] = None
    max_thinking_tokens: Annotated[
        TokensMax | None, _is("After so many tokens of thinking its mark ends it.")
    ] = None
    continue_final_message: Annotated[
        bool | None, _is("The last message is the beginning of the answer.")
    ] = None
    chat_template_kwargs: Annotated[Json | None, _is("More variables for the chat template.")] = (
        None
    )
    reasoning_effort: Annotated[
        Effort | Annotated[float, Meta(ge=0, lt=1)] | None,
        _is("For the chat template; none also sets enable_thinking and thinking to false."),
    ] = None
    verbosity: Annotated[
        Verbosity | None, _is("For the chat template, which may read it or not.")
    ] = None
    return_prompt_token_ids: Annotated[
        bool | None, _is("Tells the ids of the prompt in each choice.")
    ] = None
    tools: Annotated[Tools[Json] | None, _is("Functions that the model may call.")] = None
    tool_choice: Annotated[
        str | Json | None, _is("auto, none, required, or one function by its name.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, _is("Whether there may be several calls; true unless said.")
    ] = None
    separate_reasoning: Annotated[
        bool | None, _is("Thinking is told apart from the content; true unless said.")
    ] = None
    stream_reasoning: Annotated[
        bool | None, _is("A stream tells thinking as it comes; true unless said.")
    ] = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str
        | Annotated[
            Ids[str | TokenId | Annotated[Ids[TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ],
        _is("Text or token ids, or a list of either."),
    ]
    logprobs: Annotated[
        TopLogprobs | None, _is("Number of most likely tokens to return log probabilities for.")
    ] = None
    suffix: Annotated[
        str | None,
        _is("What comes after a gap behind each prompt of text; the answer fills the gap."),
    ] = None
    echo: Annotated[bool | None, _is("The text begins with the prompt.")] = None
    session_params: Annotated[
        SessionParams | None, _is("Where in a session the request stands.")
    ] = None
    best_of: Annotated[
        Choices | None, _is("Makes so many answers, and returns the n likeliest by token.")
    ] = None
