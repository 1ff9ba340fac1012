"""How long an answer may get, and what its tokens are drawn from: said, recommended, default."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, TypeVar

from antiphon.wire.errors import InvalidRequest, PromptTooLong
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.tokenize import SamplingDefaults

if TYPE_CHECKING:
    from antiphon.gateway.ask import Ask

T = TypeVar("T")

_TOP_K_ALL = 2**30
"""SGLang's way to say: the whole vocabulary."""


def answer_tokens(ask: Ask, *, prompt_tokens: int, context_tokens: int) -> int:
    """Return how many tokens the answer may have.

    Raises:
        PromptTooLong: The prompt fills the context.
        InvalidRequest: It is empty, or the client wants more than the context leaves.
    """
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", param=_prompt_field(ask))
    if prompt_tokens >= context_tokens:
        raise PromptTooLong.of(
            prompt_tokens=prompt_tokens, tokens_max=context_tokens, param=_prompt_field(ask)
        )
    room = context_tokens - prompt_tokens
    if ask.tokens_max is None:
        return room if ask.tokens_default is None else min(ask.tokens_default, room)
    if ask.tokens_max > room:
        raise InvalidRequest(
            "Requested token count exceeds the model's maximum context length of "
            f"{context_tokens} tokens. You requested a total of {prompt_tokens + ask.tokens_max} "
            f"tokens: {prompt_tokens} tokens from the input messages and {ask.tokens_max} tokens "
            "for the completion.",
            param=ask.tokens_field,
        )
    return ask.tokens_max


def sampling_params(
    ask: Ask,
    recommended: SamplingDefaults,
    *,
    tokens_max: int,
    vocabulary_size: int,
    seed: int,
) -> SamplingParams:
    """Fill in what the client left open. `seed` below zero draws one.

    Raises:
        InvalidRequest: A stop token is not in the vocabulary.
    """
    said = ask.sampling
    model = recommended if ask.model_defaults else SamplingDefaults()
    if max(said.stop_token_ids, default=0) >= vocabulary_size:
        raise InvalidRequest(
            f"stop_token_ids holds {max(said.stop_token_ids)}; the vocabulary ends at "
            f"{vocabulary_size - 1}",
            param="stop_token_ids",
        )
    return SamplingParams(
        max_new_tokens=tokens_max,
        temperature=_first(said.temperature, model.temperature, 1.0),
        top_p=_first(said.top_p, model.top_p, 1.0),
        top_k=_top_k(_first(said.top_k, model.top_k, -1)),
        min_p=_first(said.min_p, model.min_p, 0.0),
        seed=_first(said.seed, seed if seed >= 0 else None, secrets.randbits(63)),
        stop_token_ids=said.stop_token_ids,
        ignore_eos=said.ignore_eos,
    )


def _prompt_field(ask: Ask) -> str:
    return "prompt" if ask.messages is None else "messages"


def _first(said: T | None, recommended: T | None, default: T) -> T:
    if said is not None:
        return said
    return default if recommended is None else recommended


def _top_k(top_k: int) -> int:
    """0, which keeps every token, for all the ways to say so."""
    return 0 if top_k < 0 or top_k >= _TOP_K_ALL else top_k
