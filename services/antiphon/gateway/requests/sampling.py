"""Resolves sampling parameters: the request's, the operator's, the model's, then defaults."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import OPENAI_CODE, InvalidRequest, PromptTooLong
from antiphon.wire.processors import AllowRange, named_ids
from antiphon.wire.sampling import BIAS_MAX, LogitBias, SamplingParams
from antiphon.wire.token_outputs import pack_floats
from antiphon.wire.tokenize import SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from antiphon.config.settings import Settings
    from antiphon.gateway.requests.generation_request import GenerationRequest, SamplingOptions
    from antiphon.wire.ids import InstanceId
    from antiphon.wire.sampling import TokenOutputParams

T = TypeVar("T")

SEED_BITS = 63

_TOP_K_ALL = 2**30
"""SGLang's value of top_k for the whole vocabulary."""


NOTHING = SamplingDefaults()


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
    result does not depend on the worker that runs it.

    Args:
        gen_request: The request.
        prompt_tokens: Length of its prompt.
        contexts: Context length of each worker.
        preferred: The operator's default for requests without a limit.
        truncate: Whether a limit that is too large is reduced to what the context leaves.

    Raises:
        PromptTooLong: The prompt fills the context.
        InvalidRequest: The prompt is empty, or the limit exceeds what the context leaves.
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


def sampling_params(
    gen_request: GenerationRequest,
    recommended: SamplingDefaults,
    *,
    tokens_max: int,
    vocabulary_size: int,
    preferred: SamplingDefaults = NOTHING,
) -> SamplingParams:
    """Fill in all parameters that the request leaves unset, except the seed (see `Seeds`).

    The operator's defaults take precedence over the model's recommendations.

    Raises:
        InvalidRequest: A token is not in the vocabulary, or a number is out of range.
    """
    options = gen_request.sampling
    model = _over(preferred, recommended if gen_request.model_defaults else NOTHING)
    for name, ids in _named_ids(options):
        if max(ids, default=0) >= vocabulary_size:
            text = (
                f"{name}: token id {max(ids)} is out of range; the vocabulary ends at "
                f"{vocabulary_size - 1}"
            )
            raise InvalidRequest(text, param=name)
    for processor in options.processors:
        if isinstance(processor, AllowRange) and processor.first > processor.last:
            text = f"processors: first ({processor.first}) must not be greater than last"
            raise InvalidRequest(text, param="processors")
    if gen_request.tokens_max is not None and options.tokens_min > gen_request.tokens_max:
        text = f"min_tokens is {options.tokens_min}, more than {gen_request.tokens_field}"
        raise InvalidRequest(text, param="min_tokens")
    return SamplingParams(
        max_new_tokens=tokens_max,
        temperature=_first(options.temperature, model.temperature, 1.0),
        top_p=_first(options.top_p, model.top_p, 1.0),
        top_k=_top_k(_first(options.top_k, model.top_k, -1)),
        min_p=_first(options.min_p, model.min_p, 0.0),
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        repetition_penalty=_first(options.repetition_penalty, model.repetition_penalty, 1.0),
        min_new_tokens=min(options.tokens_min, tokens_max),
        logit_bias=_bias(options.logit_bias),
        processors=options.processors,
        grammar=options.grammar,
        seed=options.seed or 0,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        details=_requested_outputs(options.details),
    )


def _context_exceeded(
    gen_request: GenerationRequest, wanted: int, prompt_tokens: int, context_tokens: int
) -> InvalidRequest:
    """The error for a limit that exceeds the context, with this prompt or with any."""
    space = context_tokens - prompt_tokens
    if wanted > context_tokens:
        return InvalidRequest(
            f"{gen_request.tokens_field} is too large: {wanted}. The model's context of "
            f"{context_tokens} tokens leaves at most {space} tokens for the completion of "
            "an "
            f"input of {prompt_tokens} tokens.",
            param=gen_request.tokens_field,
            details={OPENAI_CODE: "invalid_value"},
        )
    return InvalidRequest(
        "Requested token count exceeds the model's maximum context length of "
        f"{context_tokens} tokens. You requested a total of {prompt_tokens + wanted} "
        f"tokens: {prompt_tokens} tokens from the input messages and {wanted} tokens "
        f"for the completion. With this input {gen_request.tokens_field} is at most {space}.",
        param=gen_request.tokens_field,
        details={OPENAI_CODE: "context_length_exceeded"},
    )


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
        raise InvalidRequest(
            f"logit_bias: values must be between {-BIAS_MAX:g} and {BIAS_MAX:g}", param="logit_bias"
        )
    return LogitBias(token_ids=pack_ids(biases), values=pack_floats(biases.values()))


def _requested_outputs(requested: TokenOutputParams | None) -> TokenOutputParams | None:
    """Requested token outputs, or None if there are none."""
    if requested is None:
        return None
    wanted = (
        requested.ids
        or requested.logprobs
        or requested.top
        or requested.named_ids
        or requested.hidden
    )
    return requested if wanted else None


def _prompt_field(gen_request: GenerationRequest) -> str:
    return "prompt" if gen_request.messages is None else "messages"


def _first(requested: T | None, recommended: T | None, default: T) -> T:
    if requested is not None:
        return requested
    return default if recommended is None else recommended


def _top_k(top_k: int) -> int:
    """Normalize all values that disable top_k to 0."""
    return 0 if top_k < 0 or top_k >= _TOP_K_ALL else top_k


def _over(above: SamplingDefaults, below: SamplingDefaults) -> SamplingDefaults:
    """Return the fields of `above`, with unset ones taken from `below`."""
    overrides = {
        name: value
        for name in above.__struct_fields__
        if (value := getattr(above, name)) is not None
    }
    return msgspec.structs.replace(below, **overrides)
