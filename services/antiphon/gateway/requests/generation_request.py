"""A request of any API before it is tokenized, and the parameters that result from it."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from antiphon.gateway.parsing.reasoning import ReasoningFormat
from antiphon.text.stop_patterns import check_patterns
from antiphon.wire.claim import AudioWindow, Claim, PixelLimits
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import OPENAI_CODE, InvalidRequest, PromptTooLong
from antiphon.wire.ids import DEFAULT_TENANT, ClientKey, InstanceId, TenantId
from antiphon.wire.media import Detail, EmbeddingForm
from antiphon.wire.sampling import (
    BIAS_MAX,
    GRAMMAR_TEXT_MAX,
    AlignmentParams,
    AllowRange,
    Grammar,
    LogitBias,
    LogitProcessor,
    PoolParams,
    SamplingDefaults,
    SamplingParams,
    StopStrings,
    TokenOutputParams,
    named_ids,
)
from antiphon.wire.submit import ResumeWindow
from antiphon.wire.token_outputs import pack_floats
from antiphon.wire.tokenize import ChatMessage, TemplateParams, TranscriptionPrompt

if TYPE_CHECKING:
    from antiphon.config.settings import Settings

SEED_BITS = 63

_TOP_K_ALL = 2**30
"""SGLang's value of top_k for the whole vocabulary."""
PROBE_API = "health"
"""API name of the request that checks whether the model generates."""


class SamplingOptions(SamplingDefaults):
    """Sampling options of a request of any API. Unset fields take defaults."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict[int, float])
    processors: tuple[LogitProcessor, ...] = ()
    grammar: Grammar | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    details: TokenOutputParams | None = None
    alignment: AlignmentParams | None = None

    def with_fields_of(self, source: msgspec.Struct) -> SamplingOptions:
        """Take the fields that `source` sets under the same name."""
        return msgspec.structs.replace(self, **set_fields(source, SamplingOptions))


class ReasoningParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to handle the reasoning of a model.

    `enabled` is None if the request does not set it. Reasoning ends with `end_id`, if that is a
    single token, or with one of `call_marks`, which start a tool call.
    """

    format: ReasoningFormat
    enabled: bool | None = None
    end_id: int | None = None
    call_marks: tuple[str, ...] = ()


class MediumSource(msgspec.Struct, frozen=True):
    """A medium of a request: a URL, base64, bytes or a claim; `param` is the API's name of it.

    With a `uuid` it may be sent again by that alone, and then has an empty `source`. With a form of
    an `embedding` the source is that, and not the image. With `audio` it is that part of a file;
    with `sound` it is audio as a whole, whose header is not read yet.
    `digest` is the SHA-256 of bytes, if it is known; else it is computed.
    """

    source: str | bytes | Claim
    param: str
    uuid: str | None = None
    detail: Detail | None = None
    embedding: EmbeddingForm | None = None
    video: bool = False
    audio: AudioWindow | None = None
    sound: bool = False
    digest: bytes = b""

    @property
    def is_audio(self) -> bool:
        return self.sound or self.audio is not None

    @property
    def kind(self) -> str:
        """What it is, for errors."""
        if self.is_audio:
            return "audio"
        return "embedding" if self.embedding is not None else "video" if self.video else "image"


def media_fields(media: Sequence[MediumSource]) -> dict[str, str]:
    """The API's names of the media of a request, for errors of other services."""
    return {f"media.{index}": each.param for index, each in enumerate(media)}


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Exactly one of `messages`, `prompt` and `prompt_ids` is set.

    Attributes:
        fields: The API's names of fields, for errors. See `field`.
        text_pair: Second text of a text pair, whose first is `prompt`.
        suffix: Text after the insertion point that follows `prompt`.
        special_tokens: Whether to add the tokenizer's special tokens to a text prompt.
        tokens_default: Limit if `tokens_max` is unset; None fills the context.
        model_defaults: Whether the model's generation config takes precedence over OpenAI's
            defaults.
        pooling: Pooling parameters, if the prompt is pooled to a vector and nothing is generated.
        cache_salt: Scope of prefix cache sharing, from `wire.digests.cache_salt`.
        resume: Set if the client may resume its stream, at any gateway.
        media: The images and videos of all messages, whose parts name them by their index.
        transcription: What to transcribe of the only medium; then `prompt` is the text before it.
        pixel_limits: Between which numbers of pixels to scale media, and which frames to see.
        continues: Whether others of its job have run: then it is taken while the gateway drains.
        private: Whether to exclude it from request logs and crash dumps.
        auto_truncate: Whether `gateway.allow_auto_truncate` applies. It does not if the end of the
            prompt matters (scoring), or if the request sets its own truncation.
    """

    api: str
    model: str | None
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    fields: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    text_pair: str | None = None
    suffix: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    continue_final_message: bool = False
    template: TemplateParams = TemplateParams()
    special_tokens: bool = True
    tokens_max: int | None = None
    tokens_default: int | None = None
    choices: int = 1
    sampling: SamplingOptions = SamplingOptions()
    stop: StopStrings = StopStrings()
    model_defaults: bool = False
    reasoning: ReasoningParams | None = None
    pooling: PoolParams | None = None
    priority: int | None = None
    cache_salt: bytes = b""
    tenant: TenantId = DEFAULT_TENANT
    key: ClientKey | None = None
    timeout_s: float | None = None
    traceparent: str | None = None
    resume: ResumeWindow | None = None
    continues: bool = False
    private: bool = False
    media: tuple[MediumSource, ...] = ()
    transcription: TranscriptionPrompt | None = None
    pixel_limits: PixelLimits | None = None
    auto_truncate: bool = True

    def field(self, name: str) -> str:
        """Return the API's name of `max_tokens`, `grammar`, or the `param` of an error."""
        return self.fields.get(name, name)


def resume_window(window_s: float, fingerprint: bytes) -> ResumeWindow:
    """The window of a request that is received now."""
    return ResumeWindow(
        window_ms=max(1, round(1000 * window_s)),
        fingerprint=fingerprint,
        created_unix_s=int(time.time()),
    )


def validate_request(gen_request: GenerationRequest) -> None:
    if gen_request.continue_final_message:
        last = gen_request.messages[-1] if gen_request.messages else None
        if last is None or last.role != "assistant":
            raise InvalidRequest(
                "continue_final_message requires a final assistant message",
                param="continue_final_message",
            )
    check_patterns(gen_request.stop.patterns, gen_request.choices)
    grammar = gen_request.sampling.grammar
    if grammar is not None and len(grammar.text) > GRAMMAR_TEXT_MAX:
        length = len(grammar.text)
        raise InvalidRequest.at(
            gen_request.field("grammar"), f"{length} characters; the limit is {GRAMMAR_TEXT_MAX}"
        )


def answer_tokens(
    gen_request: GenerationRequest,
    *,
    prompt_tokens: int,
    contexts: Collection[int],
    preferred: int | None = None,
    truncate: bool = False,
) -> int:
    """Return the maximum number of output tokens.

    A request without a limit is bounded by the smallest context length of the workers, so that the
    result does not depend on the worker that runs it. `preferred` is the operator's default for
    such requests. With `truncate`, a limit that is too large is reduced to what the context leaves.
    """
    context_tokens = max(contexts)
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", param=_prompt_field(gen_request))
    if prompt_tokens + (gen_request.tokens_max != 0) > context_tokens:
        raise PromptTooLong.of(
            prompt_tokens=prompt_tokens, tokens_max=context_tokens, param=_prompt_field(gen_request)
        )
    if gen_request.tokens_max is None:
        space = min(context for context in contexts if context > prompt_tokens) - prompt_tokens
        limit = gen_request.tokens_default if preferred is None else preferred
        return space if limit is None else min(limit, space)
    if gen_request.tokens_max > context_tokens - prompt_tokens:
        if truncate:
            return context_tokens - prompt_tokens
        raise _context_exceeded(gen_request, gen_request.tokens_max, prompt_tokens, context_tokens)
    return gen_request.tokens_max


def _context_exceeded(
    gen_request: GenerationRequest, wanted: int, prompt_tokens: int, context_tokens: int
) -> InvalidRequest:
    """The error for a limit that exceeds the context, with this prompt or with any."""
    space, field = context_tokens - prompt_tokens, gen_request.field("max_tokens")
    if wanted > context_tokens:
        return InvalidRequest(
            f"{field} is too large: {wanted}. The model's context of {context_tokens} tokens "
            f"leaves at most {space} tokens for the completion of an input of {prompt_tokens} "
            "tokens.",
            param=field,
            details={OPENAI_CODE: "invalid_value"},
        )
    return InvalidRequest(
        "Requested token count exceeds the model's maximum context length of "
        f"{context_tokens} tokens. You requested a total of {prompt_tokens + wanted} "
        f"tokens: {prompt_tokens} tokens from the input messages and {wanted} tokens "
        f"for the completion. With this input {field} is at most {space}.",
        param=field,
        details={OPENAI_CODE: "context_length_exceeded"},
    )


def _prompt_field(gen_request: GenerationRequest) -> str:
    return "prompt" if gen_request.messages is None else "messages"


class Seeds:
    """Seeds of requests without a seed.

    With `model.random_seed` they come from one generator: requests that arrive in the same order
    get the same seeds in every run, and no two requests share one. With deterministic inference
    every request gets `random_seed` itself, as in SGLang, since results must not depend on earlier
    requests.
    """

    def __init__(self, generator: random.Random, fixed: int | None = None) -> None:
        self._generator = generator
        self._fixed = fixed

    @classmethod
    def of(cls, settings: Settings, instance: InstanceId) -> Self:
        """Create from settings. Gateways with the same `random_seed` get different sequences."""
        seed = settings.model.random_seed
        if seed < 0:
            return cls(random.SystemRandom())
        generator = random.Random(f"{seed} {instance}")  # noqa: S311  # to be repeated
        return cls(generator, seed if settings.model.deterministic else None)

    def fill(self, sampling: SamplingOptions) -> SamplingOptions:
        """Set the seed of a request without one; greedy sampling needs none."""
        if sampling.seed is not None or sampling.temperature == 0:
            return sampling
        seed = self._fixed
        if seed is None:
            seed = self._generator.getrandbits(SEED_BITS)
        return msgspec.structs.replace(sampling, seed=seed)


def sampling_params(
    options: SamplingOptions,
    *defaults: msgspec.Struct,
    tokens_max: int,
    vocabulary_size: int,
) -> SamplingParams:
    """Fill in all parameters that the request leaves unset, except the seed (see `Seeds`).

    Of the `defaults`, which are the operator's and the model's, the first takes precedence.
    """
    for name, ids in _named_ids(options):
        check_token_ids(ids, vocabulary_size, name)
    for processor in options.processors:
        if isinstance(processor, AllowRange) and processor.first > processor.last:
            raise InvalidRequest.at(
                "processors", f"first ({processor.first}) must not be greater than last"
            )
    params = SamplingParams(
        max_new_tokens=tokens_max,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        min_new_tokens=min(options.min_tokens, tokens_max),
        logit_bias=_bias(options.logit_bias),
        processors=options.processors,
        grammar=options.grammar,
        seed=options.seed or 0,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        details=_requested_outputs(options.details),
        alignment=options.alignment,
    )
    for source in (*reversed(defaults), options):
        params = msgspec.structs.replace(params, **set_fields(source, SamplingDefaults))
    if params.top_k < 0 or params.top_k >= _TOP_K_ALL:
        return msgspec.structs.replace(params, top_k=0)
    return params


def check_token_ids(ids: Collection[int], vocabulary_size: int, field: str) -> None:
    if max(ids, default=0) >= vocabulary_size:
        last = vocabulary_size - 1
        text = f"token id {max(ids)} is out of range; the vocabulary ends at {last}"
        raise InvalidRequest.at(field, text)


def set_fields(source: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, object]:
    """Return the fields of `kind` that `source` has and that are set there."""
    values = {name: getattr(source, name, None) for name in kind.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def _named_ids(options: SamplingOptions) -> Iterator[tuple[str, Collection[int]]]:
    yield "stop_token_ids", options.stop_token_ids
    yield "logit_bias", options.logit_bias
    yield "details.named_ids", options.details.named_ids if options.details else ()
    for processor in options.processors:
        yield "processors", named_ids(processor)
    yield "grammar.begins_after", options.grammar.begins_after if options.grammar else ()


def _bias(biases: Mapping[int, float]) -> LogitBias | None:
    if not biases:
        return None
    if not all(abs(value) <= BIAS_MAX for value in biases.values()):
        raise InvalidRequest.at(
            "logit_bias", f"values must be between {-BIAS_MAX:g} and {BIAS_MAX:g}"
        )
    return LogitBias(token_ids=pack_ids(biases), values=pack_floats(biases.values()))


def _requested_outputs(requested: TokenOutputParams | None) -> TokenOutputParams | None:
    if requested is None:
        return None
    named = requested.named_ids
    wanted = (requested.ids, requested.logprobs, requested.top, named, requested.hidden)
    return requested if any(wanted) else None
