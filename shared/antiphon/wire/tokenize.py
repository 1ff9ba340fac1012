"""Gateway and tokenizer: a conversation or text in, token ids out."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Value
from antiphon.wire.bounds import Count, ShortText, Signed, TokenCount, UnixMs
from antiphon.wire.digests import CacheSalt
from antiphon.wire.ids import DEFAULT_TENANT, ModelName, RequestId, TenantId
from antiphon.wire.sampling import MinP, RepetitionPenalty, Temperature, TopP

MESSAGES_MAX = 4096
"""Most turns of one conversation: a turn takes several tokens, its marks included."""
CALLS_MAX = 1024
"""Most calls in one turn."""


TRUNCATED_CHARACTERS_MAX = 512 * 1024
"""Longest text that is encoded to be truncated, where the context holds no longer one: the work of
about half a second, in a child process."""


def characters_max(context_tokens: int, token_characters: int, *, truncate: bool) -> int:
    """Return the length of the longest text that is encoded; longer ones are refused unread.

    Args:
        context_tokens: Length of the context.
        token_characters: Of the longest token: the context holds no more than so many of these.
        truncate: Whether the prompt may lose its end.
    """
    most = context_tokens * token_characters
    return max(most, TRUNCATED_CHARACTERS_MAX) if truncate else most


class MessageToolCall(Value):
    """A call that the assistant made in a turn. `arguments` is the JSON text of an object."""

    id: ShortText
    name: ShortText
    arguments: str = "{}"


class ChatMessage(Value):
    """One turn of a conversation.

    Attributes:
        reasoning_content: What the assistant thought, for templates that show it.
        tool_calls: What it called.
        tool_call_id: Which call a turn of the role `tool` answers.
        without_content: Whether the content is null and not empty: templates tell them apart.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str
    name: ShortText | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[tuple[MessageToolCall, ...], Meta(max_length=CALLS_MAX)] = ()
    tool_call_id: ShortText | None = None
    without_content: bool = False


Messages = Annotated[tuple[ChatMessage, ...], Meta(max_length=MESSAGES_MAX)]


class TemplateParams(Value):
    """What a chat template gets beside the messages.

    Attributes:
        generation_prompt: Whether the answer's beginning is written after the messages.
        tools: JSON of a list of tools, as templates read it.
        options: JSON of an object: more variables of the template (`chat_template_kwargs`).
    """

    generation_prompt: bool = True
    tools: str | None = None
    options: str | None = None


class EncodeRequest(Message):
    """Render and encode. Exactly one of `messages` and `prompt` is given.

    Text is encoded with special tokens (`<bos>`) as the model's tokenizer adds them, unless
    `special_tokens` is unset; a rendered template writes its own. With a `pair`, `prompt` is the
    first of two texts, which are encoded together as the tokenizer joins them. With a `suffix`,
    `prompt` is the text before a gap to fill, and `suffix` the text behind it. `cache_salt` goes
    into the names of the prompt's blocks. Heavy texts of tenants take turns. With `truncate` a
    prompt that is longer than the context loses its end.
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
    cache_salt: CacheSalt = b""
    deadline_unix_ms: UnixMs
    left_ms: Signed | None = None
    traceparent: str | None = None


class SamplingDefaults(Value):
    """What the model's generation config says of sampling; unset fields say nothing."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Signed | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None


class PoolingCard(Value):
    """What a model that does not generate makes of a text.

    Attributes:
        scores: Whether it scores `labels`, and does not embed.
        width: Numbers of its vector, or labels.
        matryoshka: Whether a beginning of the vector is a vector, too.
        cuts: How long that may be; empty: any length.
        several: Whether labels are judged one by one.
        plain_score: Whether the score of one label is taken as it is, not through a sigmoid.
    """

    scores: bool = False
    width: Count
    matryoshka: bool = False
    cuts: tuple[Count, ...] = ()
    labels: tuple[str, ...] = ()
    several: bool = False
    plain_score: bool = False


class EncodeReply(Message):
    """The prompt as ids, its page hash chain, and what the model card says of sampling.

    Attributes:
        token_ids: int32, little-endian.
        block_digests: SHA-256 chain of the prompt's full blocks of 64 tokens, 32 bytes each.
        text_end: The last characters of what a template has written, to see how the answer begins.
        vocabulary_size: Ids of a request must lie below it.
        context_tokens: Most tokens of prompt and answer together.
        hidden_size: Numbers of a hidden state.
        architecture: Of the model, as its folder names it.
        model_type: The same in Transformers' other word for it.
        tool_parser: How the model writes calls, where its chat template shows it for certain.
        reasoning_parser: How it marks its thinking, likewise.
        reranks: Whether its chat template asks if a document answers a query, yes or no.
        second_from: Where the second text of a pair begins, if the model tells the two apart.
        pooling: What the model makes of a text, if it does not generate.
        token_characters: Of the longest token: longer texts than a context of these are refused
            unread. 0: not known.
        untruncated_tokens: Length of the whole prompt, if `token_ids` is its beginning only.
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


class CancelEncode(Message):
    """Gateway to tokenizers: the caller of `EncodeRequest` has left, or has another's answer."""

    request_id: RequestId


class DecodeRequest(Message):
    """Write ids as text: each of `token_ids` (int32, little-endian) by itself."""

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
