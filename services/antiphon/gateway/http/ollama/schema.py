"""Bodies, rejected fields and responses of generation and embedding.

A null is equivalent to an omitted field. Ollama options that configure model loading (`num_ctx`,
`num_gpu`, ...) are ignored: loading is configured by the operator.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.core.image_options import Pixels
from antiphon.gateway.http.core.limits import CallId, Json, Messages, Name, Parts, Tools
from antiphon.gateway.http.core.logprobs import TokenLogprob, TopLogprobs
from antiphon.gateway.http.core.pooling import INPUTS_MAX
from antiphon.gateway.http.core.sampling_fields import SamplingFields, Stops
from antiphon.wire.sampling import Dimensions, RepetitionPenalty, Seed

if TYPE_CHECKING:
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.base import Usage


TokensMost = Annotated[int, Meta(ge=-2, le=2**31 - 1)]


class OllamaOptions(SamplingFields):
    """Sampling parameters and stop conditions."""

    num_predict: TokensMost | None = None
    """Maximum number of tokens to generate. Negative or unset: up to the context length."""
    top_k: int | None = None
    """Number of most likely tokens to consider. 0 or less: all."""
    repetition_penalty: RepetitionPenalty | None = msgspec.field(
        default=None, name="repeat_penalty"
    )
    """Divides the logits of generated tokens. 1 disables it."""
    seed: Seed | None = None
    """Seed for reproducible sampling. -1 selects a random seed."""
    stop: Stops | None = None
    """Sequences that stop generation; not returned."""
    repeat_last_n: int | None = None
    """Window of penalties. Only -1 and 64 (Ollama's default) are accepted: penalties cover the
    whole output."""
    typical_p: float | None = None
    """Only 1 is supported."""
    tfs_z: float | None = None
    """Only 1 is supported."""
    mirostat: int | None = None
    """Only 0 is supported."""
    penalize_newline: bool | None = None
    """Only true is supported."""
    min_pixels: Pixels | None = None
    """Minimum number of pixels that images are scaled to, of models that keep their shape. Defaults
    to the model's."""
    max_pixels: Pixels | None = None
    """Maximum, at most the model's, which is the default."""
    fps: float | None = None
    """Not supported: only videos have frames, and the server takes images."""

    UNSUPPORTED: ClassVar = {
        "repeat_last_n": UnsupportedField("penalties always cover the whole output", (-1, 64)),
        "typical_p": UnsupportedField("typical sampling is not supported", (1,)),
        "tfs_z": UnsupportedField("tail-free sampling is not supported", (1,)),
        "mirostat": UnsupportedField("mirostat sampling is not supported", (0,)),
        "fps": UnsupportedField("only videos have frames, and this API has none"),
        "penalize_newline": UnsupportedField("newlines are penalized as any other token", (True,)),
    }


class OllamaFunction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The called function. `arguments` is an object; `index` is the position of the call."""

    index: int | None = None
    name: Name
    arguments: Json | None = None


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call, in an earlier turn or in a response."""

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


_CUT = UnsupportedField("truncation of prompts is configured by the operator", (False,))


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields common to /api/chat and /api/generate."""

    model: str | None = None
    """Name of the served model, with or without `:latest`. Optional."""
    format: Literal["", "json"] | Json | None = None
    """Output format: `json`, or a JSON schema."""
    options: OllamaOptions | None = None
    """Sampling parameters and stop conditions."""
    think: bool | Literal["low", "medium", "high"] | None = None
    """Whether the model reasons first, or its reasoning effort. Passed to the chat template."""
    stream: bool | None = None
    """Whether to stream the answer; true by default."""
    keep_alive: str | float | None = None
    """Accepted and ignored: the model stays loaded."""
    logprobs: bool | None = None
    """Whether to return the log probability of each token."""
    top_logprobs: TopLogprobs | None = None
    """Number of most likely tokens to return at each position."""
    truncate: bool | None = None
    """Whether to truncate a prompt that is too long. Only false is supported."""

    UNSUPPORTED: ClassVar = {
        "truncate": _CUT,
        "shift": _CUT,
        "_debug_render_only": UnsupportedField(
            "use /v1/tokenize to see the tokens of a conversation", (False,)
        ),
    }


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """Generate the assistant's reply to a conversation."""

    messages: Messages[OllamaTurn] | None = None
    """The conversation so far. A final assistant message is continued. If empty, only checks that
    the model is ready."""
    tools: Tools[Json] | None = None
    """Functions that the model may call."""


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """Generate text for a prompt."""

    prompt: str | None = None
    """The user's prompt. If empty, only checks that the model is ready."""
    suffix: str | None = None
    """Text after the insertion point, for fill-in-the-middle models. No chat template is
    applied."""
    system: str | None = None
    """System message placed before the prompt."""
    images: Parts[str] | None = None
    """Images that come before the prompt, in base64."""
    raw: bool | None = None
    """Whether to use the prompt as is, without a chat template."""

    UNSUPPORTED: ClassVar = {
        **OllamaBody.UNSUPPORTED,
        "template": UnsupportedField("the chat template is configured by the operator", ("",)),
        "context": UnsupportedField("send the messages of the conversation to /api/chat", ([],)),
        **dict.fromkeys(
            ("width", "height", "steps"), UnsupportedField("this model generates text only", (0,))
        ),
    }


class _OllamaEmbedBase(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    """Name of the served model. Optional."""
    options: Json | None = None
    """Accepted and ignored: no tokens are sampled."""
    keep_alive: str | float | None = None
    """Accepted and ignored: the model stays loaded."""


class OllamaEmbedBody(_OllamaEmbedBase, frozen=True, kw_only=True):
    """Create an embedding vector for each input."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)]
    """Text to embed, or a list of texts."""
    dimensions: Dimensions | None = None
    """Number of leading dimensions to return, for Matryoshka models."""
    truncate: bool | None = None
    """Whether to truncate a text that is too long. Only false is supported."""

    UNSUPPORTED: ClassVar = {"truncate": _CUT}


class OllamaEmbeddingBody(_OllamaEmbedBase, frozen=True, kw_only=True):
    """Create an embedding vector for one text."""

    prompt: str
    """Text to embed."""


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


class OllamaEmbedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding vectors, in the order of the inputs. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingReply(msgspec.Struct, frozen=True):
    """One embedding vector."""

    embedding: list[float]


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
