"""Gateway and tokenizer: encode conversations and texts, decode token ids."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Value
from antiphon.wire.bounds import Count, ShortText, Signed, TokenCount, UnixMs
from antiphon.wire.ids import DEFAULT_TENANT, ModelName, RequestId, TenantId
from antiphon.wire.media import MEDIA_MAX, Headers, Spans
from antiphon.wire.namespaces import CacheSalt
from antiphon.wire.sampling import AlignmentHeads, FilterWidth, SamplingDefaults

MESSAGES_MAX = 4096
"""Maximum messages of one conversation: a message takes several tokens, its marks included."""
CALLS_MAX = 1024
"""Maximum tool calls of one message."""


TRUNCATED_CHARACTERS_MAX = 512 * 1024
"""Maximum length of a text that is encoded for truncation, if the context is shorter than that:
about half a second of work, in a child process."""


def characters_max(context_tokens: int, token_characters: int, *, truncate: bool) -> int:
    """Maximum length of a text; longer ones are rejected without encoding.

    `token_characters` has the longest token; with `truncate` the end of the prompt may be cut off.
    """
    most = context_tokens * token_characters
    return max(most, TRUNCATED_CHARACTERS_MAX) if truncate else most


class MessageToolCall(Value):
    """A tool call of an assistant message. `arguments` is the JSON text of an object."""

    id: ShortText
    name: ShortText
    arguments: str = "{}"


class MessagePart(Value):
    """A part of a message: text, or the medium of this index in the request."""

    text: str | None = None
    medium: Annotated[int, Meta(ge=0, lt=MEDIA_MAX)] | None = None


class ChatMessage(Value):
    """One message of a conversation.

    Attributes:
        reasoning_content: Reasoning of the assistant, for templates that include it.
        tool_calls: Tool calls of the assistant.
        tool_call_id: The call that a message of the role `tool` has the result of.
        without_content: Whether the content is null, which templates distinguish from empty.
        parts: Text and media of a message with media, in order; `content` is their text.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str
    name: ShortText | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[tuple[MessageToolCall, ...], Meta(max_length=CALLS_MAX)] = ()
    tool_call_id: ShortText | None = None
    without_content: bool = False
    parts: Annotated[tuple[MessagePart, ...], Meta(max_length=MESSAGES_MAX)] = ()


Messages = Annotated[tuple[ChatMessage, ...], Meta(max_length=MESSAGES_MAX)]


class TemplateParams(Value):
    """Variables of a chat template beside the messages.

    Attributes:
        tools: JSON list of tools, in the form that templates expect.
        options: JSON object of more template variables (`chat_template_kwargs`).
    """

    generation_prompt: bool = True
    tools: str | None = None
    options: str | None = None


class TranscriptionPrompt(Value):
    """What the prompt of a transcription asks for; `EncodeRequest.prompt` is the text before it.

    Attributes:
        language: Its code; None: the prompt is that after which a multilingual model predicts it.
        translate: To English.
        timestamps: Whether the output has timestamps.
        output: int32, little-endian: what the model has written, which ends the prompt.
    """

    language: ShortText | None = None
    translate: bool = False
    timestamps: bool = False
    output: bytes = b""


class TranscriptionCard(Value):
    """How a model transcribes audio.

    Attributes:
        window_s: Seconds that it takes at once.
        languages: Codes of the languages that it knows; empty: it knows English alone.
        language_ids: Their tokens, in the same order.
        end_id: End of the text.
        first_timestamp_id: The timestamp 0; the ids after it are `timestamp_s` apart each.
        suppressed: Tokens that are never sampled.
        first_suppressed: Tokens that are not sampled first.
        first_timestamp_max: The latest timestamp that an output may begin with, in steps.
        no_speech_id: What follows the beginning of a prompt if the audio is silent; None: the model
            has no such token.
        alignment_heads: Layer and number of each head whose weights say where a token is; none of a
            tokenizer of a version up to 0.4.
        filter_width: See `AlignmentParams`.
    """

    window_s: Annotated[float, Meta(gt=0)]
    languages: tuple[ShortText, ...] = ()
    language_ids: tuple[TokenCount, ...] = ()
    end_id: TokenCount
    first_timestamp_id: TokenCount
    timestamp_s: Annotated[float, Meta(gt=0)]
    suppressed: tuple[TokenCount, ...] = ()
    first_suppressed: tuple[TokenCount, ...] = ()
    first_timestamp_max: TokenCount | None = None
    no_speech_id: TokenCount | None = None
    alignment_heads: AlignmentHeads = ()
    filter_width: FilterWidth = 7


class EncodeRequest(Message):
    """Render and encode a prompt. Exactly one of `messages` and `prompt` is given.

    Text is encoded with the special tokens (`<bos>`) that the model's tokenizer adds, unless
    `special_tokens` is false; a rendered template has its own. With a `pair`, `prompt` is the first
    of two texts, which are encoded together as the tokenizer joins them. With a `suffix`, `prompt`
    is the text before a gap to fill, and `suffix` the text after it. `cache_salt` goes into the
    digests of the prompt's blocks. Tenants are served round-robin for long texts. With `truncate`
    the end of a prompt longer than the context is cut off. `media` are those of all messages. With
    a `transcription`, `prompt` is the text before the audio, whose end is kept.
    """

    request_id: RequestId
    model: ModelName
    tenant: TenantId = DEFAULT_TENANT
    messages: Messages | None = None
    prompt: str | None = None
    pair: str | None = None
    suffix: str | None = None
    continue_final_message: bool = False
    template: TemplateParams = TemplateParams()
    special_tokens: bool = True
    truncate: bool = False
    media: Headers = ()
    transcription: TranscriptionPrompt | None = None
    cache_salt: CacheSalt = b""
    deadline_unix_ms: UnixMs
    left_ms: Signed | None = None
    traceparent: str | None = None


class PoolingCard(Value):
    """Output of a model that does not generate: an embedding, or scores of labels.

    Attributes:
        scores: Whether it scores `labels` instead of embedding.
        width: Length of the vector, or number of labels.
        matryoshka: Whether the vector may be truncated (Matryoshka embeddings).
        cuts: Allowed lengths of the truncated vector; empty: any.
        several: Whether it is a multi-label classifier.
        plain_score: Whether the score of a single label is returned raw, without a sigmoid.
        images: Whether images are embedded, too, to be compared with texts.
    """

    scores: bool = False
    width: Count
    matryoshka: bool = False
    cuts: tuple[Count, ...] = ()
    labels: tuple[str, ...] = ()
    several: bool = False
    plain_score: bool = False
    images: bool = False


class EncodeReply(Message):
    """The encoded prompt, its block digests, and properties of the model.

    Attributes:
        token_ids: int32, little-endian.
        block_digests: SHA-256 chain of the prompt's full blocks of 64 tokens, 32 bytes each.
        text_end: The last characters of the rendered template; the output may begin in reasoning.
        vocabulary_size: Token ids of a request must be less than it.
        context_tokens: Maximum tokens of prompt and output together.
        architecture: Architecture of the model in its `config.json`.
        tool_parser: Parser of its tool calls, if the chat template identifies it.
        reasoning_parser: Parser of its reasoning, if the chat template identifies it.
        reranks: Whether its chat template asks if a document answers a query, yes or no.
        second_from: Token index of the second text of a pair, if the model has token type ids.
        token_characters: Characters of the longest token, to reject texts that cannot fit the
            context without encoding them. 0: unknown.
        untruncated_tokens: Length of the whole prompt, if `token_ids` was truncated.
        media: Where the media of the request are in the prompt, in their order.
        sees: Whether the model takes images.
        media_width: Width of their embeddings.
        sees_videos: Whether the model takes videos.
        takes_audio: Whether the model takes audio in prompts.
        transcription: How it transcribes audio; None: it does not.
    """

    request_id: RequestId
    token_ids: bytes
    block_digests: bytes = b""
    text_end: str = ""
    vocabulary_size: TokenCount
    context_tokens: TokenCount
    hidden_size: Count = 0
    defaults: SamplingDefaults = SamplingDefaults()
    architecture: str = ""
    model_type: str = ""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    reranks: bool = False
    second_from: TokenCount | None = None
    pooling: PoolingCard | None = None
    token_characters: Count = 0
    untruncated_tokens: TokenCount | None = None
    media: Spans = ()
    sees: bool = False
    media_width: Count = 0
    sees_videos: bool = False
    takes_audio: bool = False
    transcription: TranscriptionCard | None = None


class CancelEncode(Message):
    """Gateway to tokenizers: the caller of `EncodeRequest` has left, or got another reply."""

    request_id: RequestId


class DecodeRequest(Message):
    """Decode token ids: each of `token_ids` (int32, little-endian) by itself."""

    request_id: RequestId
    model: ModelName
    token_ids: Annotated[tuple[bytes, ...], Meta(max_length=4096)]
    skip_special_tokens: bool = True
    deadline_unix_ms: UnixMs
    left_ms: Signed | None = None
    traceparent: str | None = None


class DecodeReply(Message):
    """The texts, in the order of the request."""

    request_id: RequestId
    texts: tuple[str, ...]
