"""Client and gateway over NATS: submit, text, the terminal; resume and cancel.

A client publishes `GenerateRequest` to `generate.<model>` with an inbox `client.<tenant>.<id>` as
its reply subject. Everything comes back there: `GenerateAccepted` or an `ErrorReply`, then
`GenerateText`, then one `GenerateEnd`, which carries the total length. Text is placed by (choice,
byte offset), so that a repeat is cut off and a gap is seen.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.wire.base import FinishReason, Message, Usage, Value
from antiphon.wire.bounds import (
    INT64_MAX,
    ChoiceIndex,
    Count,
    Finite,
    Signed,
    TextOffset,
    TokenOffset,
)
from antiphon.wire.digests import CacheSaltText
from antiphon.wire.errors import ErrorReply
from antiphon.wire.grammar import Grammar
from antiphon.wire.ids import ClientKey, InstanceId, ModelName, RequestId
from antiphon.wire.processors import LogitProcessors, TokenId
from antiphon.wire.sampling import (
    BIASES_MAX,
    AdditivePenalty,
    MinP,
    Priority,
    RepetitionPenalty,
    Seed,
    StopPatternList,
    StopStringList,
    Temperature,
    TokenIds,
    TokenOutputParams,
    TopP,
)
from antiphon.wire.token_outputs import TokenOutputsChunk
from antiphon.wire.tokenize import Messages

IDS_MAX = 2**19
"""Most token ids of a prompt: the gateway decodes them in 10 ms beside its streams."""
CHOICES_MAX = 128
"""Most answers to one request, as in the OpenAI API."""
PromptIds = Annotated[tuple[TokenId, ...], Meta(max_length=IDS_MAX)]
LogitBiases = Annotated[dict[TokenId, Finite], Meta(max_length=BIASES_MAX)]


class GenerateRequest(Message):
    """One request of a NATS client. Exactly one of `messages`, `prompt`, `prompt_ids` is given.

    The same `key` with the same content is a retry and answered as the first; with another
    content it is refused while the first is live. Unset sampling fields take the model's defaults.

    Attributes:
        n: How many answers; each has its own choice index, and a seed of its own from `seed`.
        logit_bias: Added to the logits of single tokens; finite.
        grammar: The form that each answer must have.
        stop_regex: Regular expressions that end a choice, as stop strings do; without look-around.
        no_stop_trim: Leaves in the text what ended it.
        skip_special_tokens: Special tokens write no text.
        continue_final_message: The last message is the beginning of the answer.
        tools: JSON of a list of tools, for the chat template.
        chat_template_kwargs: JSON of an object: more variables of the chat template.
        priority: The higher goes first, where the operator goes by priorities.
        cache_salt: Cached prefixes are shared only with requests that say the same.
        details: What is told of each token beside its text; `token_texts` adds the text of each.
        api_key: The tenant's, where the gateways ask for one. It is no part of what is asked: a
            retry may show another.
    """

    key: ClientKey
    model: ModelName
    messages: Messages | None = None
    prompt: str | None = None
    prompt_ids: PromptIds | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    min_p: MinP | None = None
    frequency_penalty: AdditivePenalty = 0.0
    presence_penalty: AdditivePenalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count = 0
    logit_bias: LogitBiases = msgspec.field(default_factory=dict[int, float])
    processors: LogitProcessors = ()
    grammar: Grammar | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] = 1
    seed: Seed | None = None
    stop: StopStringList = ()
    stop_regex: StopPatternList = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    continue_final_message: bool = False
    tools: str | None = None
    chat_template_kwargs: str | None = None
    priority: Priority | None = None
    cache_salt: CacheSaltText = ""
    details: TokenOutputParams | None = None
    token_texts: bool = False
    stream: bool = True
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    traceparent: str | None = None
    api_key: Annotated[str, Meta(max_length=4096)] | None = None


class GenerateAccepted(Message):
    """The gateway owns the request from now on; cancel and resume go to this gateway.

    `details_from` is the token offset at which the details of each choice begin: 0, or less if
    tokens of the prompt are told of. Unset, none are told.
    """

    key: ClientKey
    request_id: RequestId
    gateway: InstanceId
    details_from: TokenOffset | None = None


class GenerateText(Message):
    """More of one choice: text from a byte offset of its UTF-8 text on, details by token offset.

    Either may be empty. Outputs are counted from 0; tokens of the prompt lie before, if the request
    wanted to be told of them.
    """

    request_id: RequestId
    choice: ChoiceIndex
    text_offset: TextOffset
    text: str
    details: TokenOutputsChunk | None = None


class ChoiceEnd(Value):
    """How one choice ended. `text` and `details` are whole where the client did not stream.

    `details_end` is the token offset after the last one that was told of.
    """

    choice: ChoiceIndex
    finish_reason: FinishReason
    text_bytes: TextOffset
    text: str | None = None
    details: TokenOutputsChunk | None = None
    details_end: TokenOffset = 0
    matched_stop: str | Signed | None = None


class GenerateEnd(Message):
    """The one terminal of a request: success, or an error with what had been said by then."""

    request_id: RequestId
    choices: Annotated[tuple[ChoiceEnd, ...], Meta(min_length=1)]
    usage: Usage
    error: ErrorReply | None = None


class TextCursor(Value):
    """How much of a choice somebody has: text in bytes, details up to a token offset.

    `token_offset` unset stands for the beginning of the details.
    """

    choice: ChoiceIndex
    text_offset: TextOffset
    token_offset: TokenOffset | None = None


class GenerateResume(Message):
    """Say again what lies beyond these places, and the terminal if there is one."""

    request_id: RequestId
    places: Annotated[tuple[TextCursor, ...], Meta(max_length=CHOICES_MAX)] = ()


class GenerateCancel(Message):
    """The client no longer wants the answer."""

    request_id: RequestId


class GenerateDone(Message):
    """A resume or cancel was understood; what it asked for comes to the inbox."""

    request_id: RequestId
