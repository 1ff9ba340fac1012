"""Client and gateway over NATS: text with submit, stream, resume and cancel; and embeddings.

A client publishes `GenerateRequest` to `generate.<model>` with an inbox `client.<tenant>.<id>` as
its reply subject. All replies go there: `GenerateAccepted` or an `ErrorReply`, then `GenerateText`,
then one `GenerateEnd`, which carries the total length. Text is addressed by (choice, byte offset),
so that receivers drop repeats and detect gaps. Lost messages are requested again from the gateway
that accepted the request (`GenerateResume`). If that gateway has died, or has given up the client,
the same request with `resume_from` continues the response at any gateway. An `EmbedRequest` to
`embed.<model>` gets one reply; nothing of it is stored: a repeated one is computed again, with the
same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypedDict

import msgspec
from msgspec import Meta

from antiphon.wire.base import FinishReason, Message, Usage, Value
from antiphon.wire.bounds import (
    INT64_MAX,
    ChoiceIndex,
    Count,
    Finite,
    ResumeSeconds,
    Signed,
    TextOffset,
    TokenOffset,
)
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import ClientKey, InstanceId, ModelName, RequestId
from antiphon.wire.media import MediumInput, Sources
from antiphon.wire.namespaces import CacheSaltText
from antiphon.wire.sampling import (
    BIASES_MAX,
    AdditivePenalty,
    Dimensions,
    Grammar,
    LogitProcessor,
    LogitProcessors,
    MinP,
    Priority,
    RepetitionPenalty,
    Seed,
    StopPatternList,
    StopStringList,
    Temperature,
    TokenId,
    TokenIds,
    TokenOutputParams,
    TopP,
)
from antiphon.wire.token_outputs import TokenOutputsChunk
from antiphon.wire.tokenize import Messages

if TYPE_CHECKING:
    from collections.abc import Mapping


IDS_MAX = 2**19
"""Maximum token ids of a prompt: decoding them blocks the gateway's streams for 10 ms."""
CHOICES_MAX = 128
"""Maximum choices of one request, as in the OpenAI API."""
PromptIds = Annotated[tuple[TokenId, ...], Meta(max_length=IDS_MAX)]
LogitBiases = Annotated[dict[TokenId, Finite], Meta(max_length=BIASES_MAX)]


class GenerateRequest(Message):
    """A request of a NATS client. Exactly one of `messages`, `prompt`, `prompt_ids` is given.

    The same `key` with the same content is a retry and gets the first request's reply; with other
    content it is rejected while the first is live. Unset sampling fields take the model's defaults.

    Attributes:
        media: Images and videos that parts of messages name by their index, or whose placeholders
            stand in `prompt`, in order.
        min_pixels: Minimum number of pixels that media are scaled to, of models that keep their
            shape; unset: the model's.
        max_pixels: Maximum, at most the model's.
        fps: How many frames a second are seen of videos; unset: as the model's preprocessor says.
        max_frames: How many at most, no more than the preprocessor says.
        n: Number of choices; each has its own index, and its own seed derived from `seed`.
        logit_bias: Values added to the logits of single tokens; finite.
        grammar: Grammar that constrains each choice.
        stop_regex: Regular expressions that end a choice, as stop strings do; no look-around.
        no_stop_trim: Keep the matched stop in the text.
        skip_special_tokens: Leave special tokens out of the text.
        continue_final_message: The last message is the beginning of the response.
        tools: JSON list of tools, for the chat template.
        chat_template_kwargs: JSON object of more chat template variables.
        priority: Higher runs first, where priority scheduling is enabled.
        cache_salt: Cached prefixes are shared only with requests of the same salt.
        details: Logprobs and hidden states to return per token; `token_texts` adds each token's
            text.
        resume_s: How long the request goes on without its client or its gateway, and its output is
            kept after its end, to be resumed; without it, neither is survived.
        resume_from: The response is continued from here. It is not part of the content: everything
            else is as in the request that began the response, `resume_s` included.
        api_key: The tenant's API key, where the gateways require one. It is not part of the
            content: a retry may use another key.
    """

    key: ClientKey
    model: ModelName
    messages: Messages | None = None
    prompt: str | None = None
    prompt_ids: PromptIds | None = None
    media: Sources = ()
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    fps: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    max_frames: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
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
    resume_s: ResumeSeconds | None = None
    resume_from: ResumePosition | None = None


class CompleteOptions(TypedDict, total=False):
    """Fields of `GenerateRequest` that a caller of the client may set."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_tokens: int
    logit_bias: Mapping[int, float]
    media: tuple[MediumInput, ...]
    min_pixels: int
    max_pixels: int
    fps: float
    max_frames: int
    processors: tuple[LogitProcessor, ...]
    grammar: Grammar
    seed: int
    stop: tuple[str, ...]
    stop_regex: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    no_stop_trim: bool
    skip_special_tokens: bool
    continue_final_message: bool
    tools: str
    chat_template_kwargs: str
    priority: int
    cache_salt: str
    details: TokenOutputParams
    token_texts: bool
    resume_s: float


class GenerateOptions(CompleteOptions, total=False):
    """Options of a request that may have several choices."""

    n: int


class GenerateAccepted(Message):
    """The gateway owns the request from now on; cancel and resume go to this gateway.

    `details_from` is the token offset at which the token outputs of each choice begin: 0, or
    negative if prompt tokens are included. Unset: no token outputs.
    """

    key: ClientKey
    request_id: RequestId
    gateway: InstanceId
    details_from: TokenOffset | None = None


class GenerateText(Message):
    """More of one choice: text from a UTF-8 byte offset on, token outputs from a token offset on.

    Either may be empty. Output tokens count from 0; prompt tokens, if requested, have negative
    offsets.
    """

    request_id: RequestId
    choice: ChoiceIndex
    text_offset: TextOffset
    text: str
    details: TokenOutputsChunk | None = None


class ChoiceEnd(Value):
    """The end of one choice. `text` and `details` are complete if the client did not stream.

    `details_end` is the token offset after the last token output.
    """

    choice: ChoiceIndex
    finish_reason: FinishReason
    text_bytes: TextOffset
    text: str | None = None
    details: TokenOutputsChunk | None = None
    details_end: TokenOffset = 0
    matched_stop: str | Signed | None = None


class GenerateEnd(Message):
    """The last message of a request: success, or an error with the output so far."""

    request_id: RequestId
    choices: Annotated[tuple[ChoiceEnd, ...], Meta(min_length=1)]
    usage: Usage
    error: ErrorReply | None = None


class TextCursor(Value):
    """How much of a choice was received: text in bytes, token outputs up to a token offset.

    `token_offset` unset: no token outputs yet.
    """

    choice: ChoiceIndex
    text_offset: TextOffset
    token_offset: TokenOffset | None = None


TextCursors = Annotated[tuple[TextCursor, ...], Meta(max_length=CHOICES_MAX)]


class ResumePosition(Value):
    """How much the client has of the response to an earlier request; nothing of other choices."""

    request_id: RequestId
    places: TextCursors = ()


class GenerateResume(Message):
    """Resend everything beyond these cursors, and the end if there is one."""

    request_id: RequestId
    places: TextCursors = ()


class GenerateCancel(Message):
    """The client cancels the request."""

    request_id: RequestId


class GenerateDone(Message):
    """A resume or cancel was accepted; its results are sent to the inbox."""

    request_id: RequestId


TEXTS_MAX = 256
"""Maximum texts of one request. Their vectors must fit into one message, too."""
Texts = Annotated[tuple[str, ...], Meta(min_length=1, max_length=TEXTS_MAX)]
Rows = Annotated[
    tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=IDS_MAX)], ...],
    Meta(min_length=1, max_length=TEXTS_MAX),
]


class EmbedRequest(Message):
    """Embed texts with an embedding model, or score them with a classifier or reward model.

    Attributes:
        texts: Exactly one of `texts` and `prompt_ids` is given.
        pairs: A second text for each, encoded together with it.
        prompt_ids: Token ids in place of texts.
        dimensions: Truncate each vector to this length (Matryoshka models only).
        cache_salt: Cached prefixes are shared only with requests of the same salt.
        priority: Higher runs first, where priority scheduling is enabled.
        api_key: The tenant's API key, where the gateways require one.
    """

    model: ModelName
    texts: Texts | None = None
    pairs: Texts | None = None
    prompt_ids: Rows | None = None
    dimensions: Dimensions | None = None
    cache_salt: CacheSaltText = ""
    priority: Priority | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    traceparent: str | None = None
    api_key: Annotated[str, Meta(max_length=4096)] | None = None


class EmbedReply(Message):
    """The vectors or scores of the texts, in the order of the request.

    Attributes:
        vectors: float32, little-endian; raw scores of the model, one for each label.
        labels: Labels of the scores; empty for embeddings.
    """

    model: ModelName
    vectors: tuple[bytes, ...]
    labels: tuple[str, ...] = ()
    usage: Usage
