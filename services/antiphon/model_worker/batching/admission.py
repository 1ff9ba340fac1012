"""Who may come in at all: what can never run here is refused before it costs anything."""

from __future__ import annotations

import msgspec
import numpy as np

from antiphon.model_worker.batching import logits, logprobs, pooling
from antiphon.model_worker.batching.request import WIRE_IDS, RequestState
from antiphon.wire.errors import InvalidRequest, PromptTooLong, Unsupported


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one step, one request and this model can take.

    Attributes:
        step_tokens_max: Most tokens of one plan.
        chunk_tokens: Longest piece of one prompt in a plan. None: prompts are never cut, and one
            that is longer than a step has a step to itself.
        fill_tokens: Prompt tokens with which a plan is full: no further prompt joins it, so that
            the first prompts have their answers begun before the last are computed. None: a plan
            takes as many as fit.
        prefill_max: Most prompts in one plan; None: as many as fit.
        mixed: Whether prompts are computed in the same plans as decodes. If not they take turns,
            so that neither waits for more than one plan of the others.
        running_max: Most requests with pages.
        queue_max: Most requests that wait beyond those that have a slot coming.
        context_tokens: Most tokens of prompt and answer, by the model and by the page pool.
        end_ids: Tokens with which the model ends an answer.
        weight_version: What the weights are called, beyond what was loaded at the start.
        stream_interval: Tokens of an answer that are worth a word.
        hidden_states: Whether a request may be told hidden states.
        pool_width: How many numbers a prompt becomes, in a model that draws no tokens. None: one
            that does, and pools nothing.
        queue_timeout_s: How long a request may wait until it is started. None: for ever.
        running_timeout_s: How long a request may take once it is started. None: for ever.
        checkpoint_tokens: A state is kept for others each so many tokens; whole pages. Of models
            without recurrent states it says nothing.
        follow_timeout_s: How long a token may take to be followed through a grammar.
        conservativeness: By how much more of their answers is kept free for running requests than
            experience asks for; see `NewTokenRatio`.
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
    """Refuse what can never run here, before it costs anything.

    Raises:
        InvalidRequest: There is no prompt, or an id is not in the vocabulary.
        PromptTooLong: Prompt and one token do not fit in the context, or in the empty cache.
        Unsupported: It was begun with other weights or an adapter, or wants hidden states; or it
            wants tokens of a model that gives vectors, or the other way round.
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
        raise Unsupported("this worker runs no adapters")
    if state.weights_digest not in {"", limits.weights_digest}:
        raise Unsupported("the answer was begun with other weights")


def outputs_max(state: RequestState, limits: EngineLimits) -> int:
    """Length of the longest answer: what was asked for, as far as the context goes."""
    prompt_tokens = len(state.prompt_ids) // 4
    return min(state.sampling.max_new_tokens, limits.context_tokens - prompt_tokens)
