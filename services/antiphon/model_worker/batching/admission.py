"""Who may come in: requests that can run at all, and now only those whose pages are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.request import WIRE_IDS, RequestState
from antiphon.wire.errors import InvalidRequest, PromptTooLong, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.cache.index import PrefixIndex
    from antiphon.model_worker.cache.table import CachePools, PageTable


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one step, one request and this model can take.

    Attributes:
        step_tokens_max: Most tokens of one plan.
        chunk_tokens: Longest piece of one prompt in a plan.
        context_tokens: Most tokens of prompt and answer, by the model and by the page pool.
        end_ids: Tokens with which the model ends an answer.
        headroom_tokens: How far each running request can surely go on before pages must be found
            for it. Reserving whole answers would leave most of the pool idle, for answers end
            early; reserving nothing would admit requests only to retract them.
    """

    step_tokens_max: int
    chunk_tokens: int
    running_max: int
    context_tokens: int
    vocab_size: int
    end_ids: frozenset[int]
    weights_digest: str
    headroom_tokens: int = 64


def check(state: RequestState, limits: Limits) -> None:
    """Refuse what can never run here, before it costs anything.

    Raises:
        InvalidRequest: There is no prompt, or it holds ids that are not in the vocabulary.
        PromptTooLong: Prompt and one token do not fit in the context, or in the empty cache.
        Unsupported: It was begun with other weights or an adapter.
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
    if state.adapter_digest:
        raise Unsupported("this worker runs no adapters")
    if state.weights_digest not in {"", limits.weights_digest}:
        raise Unsupported("the answer was begun with other weights")


def outputs_max(state: RequestState, limits: Limits) -> int:
    """Length of the longest answer: what was asked for, as far as the context goes."""
    prompt_tokens = len(state.prompt_ids) // 4
    return min(state.sampling.max_new_tokens, limits.context_tokens - prompt_tokens)


def headroom(request: Request, table: PageTable, tokens: int) -> list[int]:
    """Pages a group that a request lacks to go on for so many tokens, or to its end."""
    return table.need(min(request.length + tokens, request.tokens_max))


def find_pages(needs: Sequence[int], pools: CachePools, index: PrefixIndex) -> bool:
    """Whether so many pages a group are free, after the index gave up what it can."""
    if _short(needs, pools):
        index.evict([max(0, n - f) for n, f in zip(needs, pools.free(), strict=True)])
    return not _short(needs, pools)


def _short(needs: Sequence[int], pools: CachePools) -> bool:
    return any(need > free for need, free in zip(needs, pools.free(), strict=True))
