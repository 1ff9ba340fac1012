"""Engine limits, and the check that rejects requests that can never run on this worker."""

from __future__ import annotations

import msgspec
import numpy as np

from antiphon.model_worker.batching import logits, logprobs, pooling
from antiphon.model_worker.batching.request import WIRE_IDS, RequestState
from antiphon.wire.errors import InvalidRequest, PromptTooLong, Unsupported


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step, of a request and of the model.

    Attributes:
        step_tokens_max: Maximum number of tokens in a plan.
        chunk_tokens: Maximum length of a prefill chunk. None: chunked prefill is off, and a prompt
            that is longer than a step has a step to itself.
        fill_tokens: Number of prefill tokens with which a plan is full: no further prefill joins
            it, so that the first requests decode before the last ones are prefilled. None: a plan
            takes as many as fit.
        prefill_max: Maximum number of prefilling requests in a plan. None: as many as fit.
        mixed: Whether prefill chunks and decodes share a plan (mixed chunked prefill). If not,
            prefill steps and decode steps alternate, so that neither waits for more than one plan
            of the other kind.
        running_max: Maximum number of running requests.
        queue_max: Maximum number of waiting requests beyond those that get a free slot.
        context_tokens: Maximum number of tokens of prompt and output, by model and page pool.
        end_ids: The model's EOS ids.
        weight_version: Name of the weights, which may change after they were loaded.
        stream_interval: Number of output tokens from one message of a stream to the next.
        hidden_states: Whether requests may ask for hidden states.
        pool_width: Width of the pooled vector of a model that generates no tokens. None: a
            generative model, which pools nothing.
        queue_timeout_s: Maximum time in the queue. None: no limit.
        running_timeout_s: Maximum time from the start of a request. None: no limit.
        checkpoint_tokens: Distance of the cached checkpoints of recurrent states; whole pages.
            Unused for models without recurrent states.
        follow_timeout_s: Maximum time for a grammar matcher to accept a token.
        conservativeness: Factor on the share of remaining output tokens for which pages are
            reserved; see `NewTokenRatio`.
    """

    step_tokens_max: int
    chunk_tokens: int | None
    fill_tokens: int | None = None
    prefill_max: int | None = None
    mixed: bool = True
    running_max: int
    queue_max: int = 256
    context_tokens: int
    vocab_size: int
    end_ids: frozenset[int]
    weights_digest: str
    weight_version: str = "default"
    stream_interval: int = 1
    hidden_states: bool = False
    pool_width: int | None = None
    queue_timeout_s: float | None = None
    running_timeout_s: float | None = None
    checkpoint_tokens: int = 256
    follow_timeout_s: float = 10.0
    conservativeness: float = 1.0


def check(state: RequestState, limits: EngineLimits) -> None:
    """Reject a request that can never run on this worker.

    Raises:
        InvalidRequest: The prompt is empty, or an id is not in the vocabulary.
        PromptTooLong: Prompt and one token do not fit in the context, or in the empty cache.
        Unsupported: The request was started with other weights or an adapter, or asks for hidden
            states; or it asks a pooling model for tokens, or a generative one for a vector.
    """
    if len(state.prompt_ids) % 4 or len(state.output_ids) % 4:
        raise InvalidRequest("token ids are not a multiple of 4 bytes", param="input_ids")
    ids = np.frombuffer(state.prompt_ids + state.output_ids, WIRE_IDS)
    prompt_tokens = len(state.prompt_ids) // 4
    if not prompt_tokens:
        raise InvalidRequest("the prompt has no tokens", param="input_ids")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise InvalidRequest(
            f"token ids must be from 0 to {limits.vocab_size - 1}", param="input_ids"
        )
    if len(ids) + min(state.sampling.max_new_tokens, 1) > limits.context_tokens:
        raise PromptTooLong.of(prompt_tokens=prompt_tokens, tokens_max=limits.context_tokens)
    logits.check_sampling(state.sampling, limits.vocab_size)
    logprobs.check_logprobs(state.sampling, limits.vocab_size, hidden_states=limits.hidden_states)
    pooling.check_pooling(state.sampling, limits.pool_width)
    if state.adapter_digest:
        raise Unsupported("this worker does not support adapters")
    if state.weights_digest not in {"", limits.weights_digest}:
        raise Unsupported("the request was started with other weights")


def outputs_max(state: RequestState, limits: EngineLimits) -> int:
    """Maximum number of output tokens: `max_new_tokens`, limited by the context."""
    prompt_tokens = len(state.prompt_ids) // 4
    return min(state.sampling.max_new_tokens, limits.context_tokens - prompt_tokens)
