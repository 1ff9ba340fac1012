"""The checks that reject requests that can never run on this worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.alignment import check_alignment
from antiphon.model_worker.batching.logits import unpack_bias
from antiphon.model_worker.batching.media import check_media
from antiphon.model_worker.batching.state import WIRE_IDS, EngineLimits, RequestState
from antiphon.wire.errors import InvalidRequest, PromptTooLong, Unsupported
from antiphon.wire.sampling import BIAS_MAX, LogitBias, SamplingParams, named_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints


def check(state: RequestState, limits: EngineLimits) -> None:
    """Reject a request that can never run on this worker.

    Raises:
        InvalidRequest: The prompt is empty, or a parameter does not fit the model.
        PromptTooLong: Prompt and one token do not fit in the context, or in the empty cache.
        Unsupported: It asks for hidden states that are disabled, a pooling model for tokens, or a
            generative one for a vector, or a model that does not see for media.
    """
    if len(state.prompt_ids) % 4 or len(state.output_ids) % 4:
        raise InvalidRequest("token ids are not a multiple of 4 bytes", param="input_ids")
    ids = np.frombuffer(state.prompt_ids + state.output_ids, WIRE_IDS)
    prompt_tokens = len(state.prompt_ids) // 4
    if not prompt_tokens:
        raise InvalidRequest("the prompt has no tokens", param="input_ids")
    _check_ids(ids, limits, "input_ids")
    if len(ids) + min(state.sampling.max_new_tokens, 1) > limits.context_tokens:
        raise PromptTooLong.of(prompt_tokens=prompt_tokens, tokens_max=limits.context_tokens)
    sampling = state.sampling
    if sampling.logit_bias is not None:
        _check_bias(sampling.logit_bias, limits)
    for processor in sampling.processors:
        _check_ids(named_ids(processor), limits, "processors")
    _check_ids(sampling.stop_token_ids, limits, "stop_token_ids")
    _check_logprobs(sampling, limits)
    _check_pooling(sampling, limits.pool_width)
    check_alignment(state, limits)
    check_media(state.media, ids[:prompt_tokens], limits)


def outputs_max(state: RequestState, limits: EngineLimits) -> int:
    """Maximum number of output tokens: `max_new_tokens`, limited by the context."""
    prompt_tokens = len(state.prompt_ids) // 4
    return min(state.sampling.max_new_tokens, limits.context_tokens - prompt_tokens)


def _check_bias(bias: LogitBias, limits: EngineLimits) -> None:
    if len(bias.token_ids) != len(bias.values) or len(bias.token_ids) % WIRE_IDS.itemsize:
        raise InvalidRequest("a logit bias has a value for each id", param="logit_bias")
    ids, values = unpack_bias(bias)
    if len(np.unique(ids)) != len(ids) or not (np.abs(values) <= BIAS_MAX).all():
        text = f"a logit bias names each id once, with a value up to {BIAS_MAX:g} either way"
        raise InvalidRequest(text, param="logit_bias")
    _check_ids(ids, limits, "logit_bias")


def _check_ids(ids: Sequence[int] | Ints, limits: EngineLimits, param: str) -> None:
    # As unsigned numbers, of which negative ones are the largest.
    if len(ids) and np.asarray(ids, np.int64).view(np.uint64).max() >= limits.vocab_size:
        raise InvalidRequest(f"token ids must be from 0 to {limits.vocab_size - 1}", param=param)


def _check_logprobs(sampling: SamplingParams, limits: EngineLimits) -> None:
    params = sampling.details
    if params is None:
        return
    _check_ids(params.named_ids, limits, "details.named_ids")
    if params.hidden and not limits.hidden_states:
        text = (
            "hidden states are disabled; start the worker with --enable-return-hidden-states"
            " (batching.hidden_states)"
        )
        raise Unsupported(text, param="details.hidden")


def _check_pooling(sampling: SamplingParams, width: int | None) -> None:
    """A model with a vector `width` pools, one without generates."""
    params = sampling.pool
    if params is None:
        if width is not None:
            raise Unsupported("this model does not generate: it returns a vector for each text")
        return
    if width is None:
        raise Unsupported("this model does not embed: it generates", param="pool")
    if sampling.max_new_tokens or sampling.details is not None:
        text = "a pooling request generates no tokens and returns no logprobs"
        raise InvalidRequest(text, param="pool")
    if params.dimensions is not None and params.dimensions > width:
        raise InvalidRequest(f"dimensions must be at most {width}", param="dimensions")
