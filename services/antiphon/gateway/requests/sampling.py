"""Resolves sampling parameters: the request's, the operator's, the model's, then defaults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
from msgspec import Meta

from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import (
    BIAS_MAX,
    AdditivePenalty,
    AllowRange,
    Grammar,
    LogitBias,
    LogitProcessor,
    SamplingDefaults,
    SamplingParams,
    TokenOutputParams,
    named_ids,
)
from antiphon.wire.token_outputs import pack_floats

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from antiphon.config.settings import Settings
    from antiphon.wire.ids import InstanceId

SEED_BITS = 63

_TOP_K_ALL = 2**30
"""SGLang's value of top_k for the whole vocabulary."""


class SamplingFields(SamplingDefaults):
    """Sampling fields that the bodies of the HTTP APIs share."""

    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """Number of most likely tokens to consider. -1: all."""
    frequency_penalty: AdditivePenalty | None = None
    """Penalty for each time a token was generated."""
    presence_penalty: AdditivePenalty | None = None
    """Penalty for tokens that were generated."""


class SamplingOptions(SamplingFields):
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

    def with_fields_of(self, source: msgspec.Struct) -> SamplingOptions:
        """Take the fields that `source` sets under the same name."""
        return msgspec.structs.replace(self, **set_fields(source, SamplingOptions))


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
        if max(ids, default=0) >= vocabulary_size:
            last = vocabulary_size - 1
            text = f"token id {max(ids)} is out of range; the vocabulary ends at {last}"
            raise InvalidRequest.at(name, text)
    for processor in options.processors:
        if isinstance(processor, AllowRange) and processor.first > processor.last:
            raise InvalidRequest.at(
                "processors", f"first ({processor.first}) must not be greater than last"
            )
    params = SamplingParams(
        max_new_tokens=tokens_max,
        min_new_tokens=min(options.min_tokens, tokens_max),
        logit_bias=_bias(options.logit_bias),
        processors=options.processors,
        grammar=options.grammar,
        seed=options.seed or 0,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        details=_requested_outputs(options.details),
    )
    for source in (*reversed(defaults), options):
        params = msgspec.structs.replace(params, **set_fields(source, SamplingFields))
    if params.top_k < 0 or params.top_k >= _TOP_K_ALL:
        return msgspec.structs.replace(params, top_k=0)
    return params


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
    wanted = (
        requested.ids
        or requested.logprobs
        or requested.top
        or requested.named_ids
        or requested.hidden
    )
    return requested if wanted else None
