"""How long an answer may get, and what its tokens are drawn from: said, recommended, default."""

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
"""SGLang's way to say: the whole vocabulary."""


NOTHING = SamplingDefaults()


class Seeds:
    """Seeds of the requests that name none.

    With `model.random_seed` they are the sequence of one generator: requests that come in the same
    order get the same seeds in every run, and no two requests share one. Deterministic inference
    gives that very number to each, as SGLang does: there a result must not depend on what came
    before.
    """

    def __init__(self, generator: random.Random, fixed: int | None = None) -> None:
        self._generator = generator
        self._fixed = fixed

    @classmethod
    def of(cls, settings: Settings, instance: InstanceId) -> Self:
        """Read the settings. Two gateways with one `random_seed` draw two sequences."""
        seed = settings.model.random_seed
        if seed < 0:
            return cls(random.SystemRandom())
        generator = random.Random(f"{seed} {instance}")  # noqa: S311  # to be repeated
        return cls(generator, seed if settings.model.deterministic else None)

    def fill(self, sampling: SamplingOptions) -> SamplingOptions:
        """Give a seed to a request that names none; greedy sampling needs none."""
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
    """Return how many tokens the answer may have.

    What the client does not bound is bounded by every worker that holds the prompt: the answer is
    as long whoever runs it, and so everybody may.

    Args:
        gen_request: The request.
        prompt_tokens: Of its prompt.
        contexts: The longest context of each worker.
        preferred: The operator's limit for requests without one.
        truncate: Whether the client gets what the context leaves if it wants more.

    Raises:
        PromptTooLong: The prompt fills the context.
        InvalidRequest: It is empty, or the client wants more than the context leaves.
    """
    context_tokens = max(contexts)
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", param=_prompt_field(gen_request))
    if prompt_tokens + (gen_request.tokens_max != 0) > context_tokens:
        raise PromptTooLong.of(
            prompt_tokens=prompt_tokens, tokens_max=context_tokens, param=_prompt_field(gen_request)
        )
    if gen_request.tokens_max is None:
        room = min(context for context in contexts if context > prompt_tokens) - prompt_tokens
        limit = gen_request.tokens_default if preferred is None else preferred
        return room if limit is None else min(limit, room)
    if gen_request.tokens_max > context_tokens - prompt_tokens:
        if truncate:
            return context_tokens - prompt_tokens
        raise _too_many(gen_request, gen_request.tokens_max, prompt_tokens, context_tokens)
    return gen_request.tokens_max


def sampling_params(
    gen_request: GenerationRequest,
    recommended: SamplingDefaults,
    *,
    tokens_max: int,
    vocabulary_size: int,
    preferred: SamplingDefaults = NOTHING,
) -> SamplingParams:
    """Fill in what the client left open, but for the seed: see `Seeds`.

    What the operator prefers goes before what the model recommends.

    Raises:
        InvalidRequest: A token is not in the vocabulary, or a number is out of its range.
    """
    said = gen_request.sampling
    model = _over(preferred, recommended if gen_request.model_defaults else NOTHING)
    for name, ids in _named_ids(said):
        if max(ids, default=0) >= vocabulary_size:
            text = f"{name} holds {max(ids)}; the vocabulary ends at {vocabulary_size - 1}"
            raise InvalidRequest(text, param=name)
    for processor in said.processors:
        if isinstance(processor, AllowRange) and processor.first > processor.last:
            text = f"processors: first is {processor.first}, beyond last"
            raise InvalidRequest(text, param="processors")
    if gen_request.tokens_max is not None and said.tokens_min > gen_request.tokens_max:
        text = f"min_tokens is {said.tokens_min}, more than {gen_request.tokens_field}"
        raise InvalidRequest(text, param="min_tokens")
    return SamplingParams(
        max_new_tokens=tokens_max,
        temperature=_first(said.temperature, model.temperature, 1.0),
        top_p=_first(said.top_p, model.top_p, 1.0),
        top_k=_top_k(_first(said.top_k, model.top_k, -1)),
        min_p=_first(said.min_p, model.min_p, 0.0),
        frequency_penalty=said.frequency_penalty,
        presence_penalty=said.presence_penalty,
        repetition_penalty=_first(said.repetition_penalty, model.repetition_penalty, 1.0),
        min_new_tokens=min(said.tokens_min, tokens_max),
        logit_bias=_bias(said.logit_bias),
        processors=said.processors,
        grammar=said.grammar,
        seed=said.seed or 0,
        stop_token_ids=said.stop_token_ids,
        ignore_eos=said.ignore_eos,
        details=_details(said.details),
    )


def _too_many(
    gen_request: GenerationRequest, wanted: int, prompt_tokens: int, context_tokens: int
) -> InvalidRequest:
    """An answer that does not fit: beside this prompt, or in any context."""
    room = context_tokens - prompt_tokens
    if wanted > context_tokens:
        return InvalidRequest(
            f"{gen_request.tokens_field} is too large: {wanted}. The model's context of "
            f"{context_tokens} tokens leaves at most {room} tokens for the completion of an "
            f"input of {prompt_tokens} tokens.",
            param=gen_request.tokens_field,
            details={OPENAI_CODE: "invalid_value"},
        )
    return InvalidRequest(
        "Requested token count exceeds the model's maximum context length of "
        f"{context_tokens} tokens. You requested a total of {prompt_tokens + wanted} "
        f"tokens: {prompt_tokens} tokens from the input messages and {wanted} tokens "
        f"for the completion. With this input {gen_request.tokens_field} is at most {room}.",
        param=gen_request.tokens_field,
        details={OPENAI_CODE: "context_length_exceeded"},
    )


def _named_ids(said: SamplingOptions) -> Iterator[tuple[str, Collection[int]]]:
    yield "stop_token_ids", said.stop_token_ids
    yield "logit_bias", said.logit_bias
    yield "details.named_ids", said.details.named_ids if said.details else ()
    for processor in said.processors:
        yield "processors", named_ids(processor)
    yield "grammar.begins_after", said.grammar.begins_after if said.grammar else ()


def _bias(said: Mapping[int, float]) -> LogitBias | None:
    if not said:
        return None
    if not all(abs(value) <= BIAS_MAX for value in said.values()):
        raise InvalidRequest(f"a value is beyond {BIAS_MAX:g} either way", param="logit_bias")
    return LogitBias(token_ids=pack_ids(said), values=pack_floats(said.values()))


def _details(said: TokenOutputParams | None) -> TokenOutputParams | None:
    """What is wanted; None where that is nothing."""
    if said is None:
        return None
    wanted = said.ids or said.logprobs or said.top or said.named_ids or said.hidden
    return said if wanted else None


def _prompt_field(gen_request: GenerationRequest) -> str:
    return "prompt" if gen_request.messages is None else "messages"


def _first(said: T | None, recommended: T | None, default: T) -> T:
    if said is not None:
        return said
    return default if recommended is None else recommended


def _top_k(top_k: int) -> int:
    """0, which keeps every token, for all the ways to say so."""
    return 0 if top_k < 0 or top_k >= _TOP_K_ALL else top_k


def _over(above: SamplingDefaults, below: SamplingDefaults) -> SamplingDefaults:
    """The fields of `above`, and of `below` those that it leaves open."""
    said = {
        name: value
        for name in above.__struct_fields__
        if (value := getattr(above, name)) is not None
    }
    return msgspec.structs.replace(below, **said)
