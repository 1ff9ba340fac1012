"""Logprobs, hidden states and pooled vectors: requested in the step plan, read from its outcome.

A model either generates tokens or pools, so all rows of a plan do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.plan import (
    Floats,
    Ints,
    LogprobsBatch,
    LogprobsRequest,
    PoolingRequest,
    StepOutcome,
)
from antiphon.wire.codec import pack_ids
from antiphon.wire.token_outputs import TokenOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.request import BatchRow, Request
    from antiphon.wire.sampling import TokenOutputParams

_NO_TOKEN = pack_ids([-1])
"""The id in place of a sampled token."""


class LogprobsSlots:
    """The requested token outputs of running requests, by slot."""

    def __init__(self) -> None:
        self._params: dict[int, TokenOutputParams] = {}

    @property
    def idle(self) -> bool:
        return not self._params

    def fill(self, request: Request) -> None:
        if request.state.sampling.details is not None:
            self._params[request.slot] = request.state.sampling.details

    def clear(self, slot: int) -> None:
        self._params.pop(slot, None)

    def request(self, rows: Sequence[BatchRow], query_start: Ints) -> LogprobsRequest | None:
        """The token outputs to request for these rows; None if there are none."""
        if not self._params:
            return None
        selected: list[int] = []
        prompt_tokens: list[Ints] = []
        prompt_targets: list[Ints] = []
        for index, row in enumerate(rows):
            if row.request.slot not in self._params:
                continue
            indices, targets = _prompt_targets(row)
            if row.draws or len(targets):
                selected.append(index)
                prompt_tokens.append(indices + query_start[index])
                prompt_targets.append(targets)
        if not selected:
            return None
        requested = [self._params[rows[index].request.slot] for index in selected]
        return LogprobsRequest(
            rows=np.array(selected, np.int32),
            logprobs=np.array([params.logprobs for params in requested], np.bool_),
            top=np.array([params.top for params in requested], np.int32),
            named_starts=np.cumsum([0, *(len(p.named_ids) for p in requested)], dtype=np.int32),
            named_ids=np.array([i for params in requested for i in params.named_ids], np.int32),
            hidden=np.array([params.hidden for params in requested], np.bool_),
            prompt_tokens=np.concatenate(prompt_tokens).astype(np.int32, copy=False),
            prompt_targets=np.concatenate(prompt_targets).astype(np.int32, copy=False),
        )


def pooling_request(rows: Sequence[BatchRow]) -> PoolingRequest | None:
    """The pooling of these rows; None if the model generates tokens."""
    if rows[0].request.state.sampling.pool is None:
        return None
    params = [row.request.state.sampling.pool for row in rows]
    return PoolingRequest(
        ends=np.array([row.end == row.request.prompt_tokens for row in rows], np.bool_),
        dimensions=np.array([(pool and pool.dimensions) or 0 for pool in params], np.int32),
    )


def token_types(rows: Sequence[BatchRow]) -> Ints | None:
    """1 for each token of the second text of a pair, (T,); None if no row has one."""
    params = [row.request.state.sampling.pool for row in rows]
    if not any(pool is not None and pool.second_from is not None for pool in params):
        return None
    types = [
        np.arange(row.start, row.end) >= (row.end if second is None else second)
        for row, second in zip(rows, (pool and pool.second_from for pool in params), strict=True)
    ]
    return np.concatenate(types).astype(np.int32)


def write_outputs(
    request: Request, outcome: StepOutcome, row: int, *, accepted: int, kept: int
) -> None:
    """Write the requested outputs of a row to its request.

    Of the `accepted` tokens of the row only the first `kept` are part of the output: a stop token
    and what follows it are not.
    """
    if outcome.vectors is not None:
        start, end = outcome.vectors.starts[row : row + 2].tolist()
        assert end == start or not accepted, "a token was sampled in place of a vector"
        if end > start:  # else the prompt continues after the row
            pooled = _bytes(outcome.vectors.values[start:end])
            request.tell(TokenOutputs(count=1, token_ids=_NO_TOKEN, pooled=pooled), 0)
    elif outcome.details is not None:
        start, end = outcome.details.starts[row : row + 2].tolist()
        params = request.state.sampling.details
        if params is not None and end > start:
            prompt_entries = end - start - accepted
            tokens = slice(start, start + prompt_entries + kept)
            request.tell(_requested(outcome.details, tokens, params), prompt_entries)


def _requested(details: LogprobsBatch, tokens: slice, params: TokenOutputParams) -> TokenOutputs:
    top, named = params.top, len(params.named_ids)
    hidden = details.hidden
    return TokenOutputs(
        count=tokens.stop - tokens.start,
        token_ids=_bytes(details.token_ids[tokens]),
        logprobs=_bytes(details.logprobs[tokens]) if params.logprobs else b"",
        top_ids=_bytes(details.top_ids[tokens, :top]),
        top_logprobs=_bytes(details.top_logprobs[tokens, :top]),
        named_logprobs=_bytes(details.named_logprobs[tokens, :named]),
        hidden=_bytes(hidden[tokens]) if params.hidden and hidden is not None else b"",
    )


def _prompt_targets(row: BatchRow) -> tuple[Ints, Ints]:
    """The tokens of a prefill row after which a prompt token is scored, and these tokens."""
    request = row.request
    first = max(request.told, row.start + 1)
    last = min(row.end + 1, request.prompt_tokens)
    indices = np.arange(first - 1, last - 1, dtype=np.int32) - row.start
    targets = request.ids[first : max(first, last)]
    if request.scores and row.end == request.prompt_tokens:
        indices = np.append(indices, np.int32(row.end - 1 - row.start))
        targets = np.append(targets, np.int32(-1))
    return indices, targets


def _bytes(values: Ints | Floats) -> bytes:
    little = "<i4" if values.dtype == np.int32 else "<f4"
    return values.astype(little, copy=False).tobytes()
