"""Logprobs, hidden states and pooled vectors: requested in the step plan, read from its outcome.

A model either generates tokens or pools, so all rows of a plan do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import (
    NO_IDS,
    Flags,
    Floats,
    Indices,
    Ints,
    LogprobsBatch,
    LogprobsRequest,
    PoolingRequest,
    StepOutcome,
)
from antiphon.wire.codec import pack_ids
from antiphon.wire.token_outputs import TokenOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.rows import SlotSet, StepRows
    from antiphon.wire.sampling import TokenOutputParams

_NO_TOKEN = pack_ids([-1])
"""The id in place of a sampled token."""


class LogprobsParams:
    """The token outputs that the `running` requests return, by slot.

    Attributes:
        requested: (S,) whether a request returns any.
        rowwise: (S,) whether it returns more than ids and logprobs of the sampled tokens.
    """

    def __init__(self, slots_max: int, running: Mapping[int, Request]) -> None:
        self.requested = np.zeros(slots_max, np.bool_)
        self.rowwise = np.zeros(slots_max, np.bool_)
        self._running = running
        self._logprobs = np.zeros(slots_max, np.bool_)
        self._hidden = np.zeros(slots_max, np.bool_)
        self._top = np.zeros(slots_max, np.int32)
        self._count = 0
        self._named: dict[int, tuple[int, ...]] = {}

    def fill(self, request: Request) -> None:
        slot, sampling = request.slot, request.state.sampling
        if (params := sampling.details) is None:
            self.rowwise[slot] = request.scores
            return
        self.requested[slot] = True
        self._count += 1
        self.rowwise[slot] = request.scores or not params.sampled_only
        self._logprobs[slot] = params.logprobs
        self._hidden[slot] = params.hidden
        self._top[slot] = params.top
        if params.named_ids:
            self._named[slot] = params.named_ids

    def clear(self, slot: int) -> None:
        self._count -= int(self.requested[slot])
        self.requested[slot] = self.rowwise[slot] = False
        self._named.pop(slot, None)

    def request(self, rows: StepRows, query_start: Ints) -> LogprobsRequest | None:
        """The token outputs to request for these rows; None if there are none."""
        if not self._count:
            return None
        requested = self.requested[rows.slots.at]
        selected = (requested & rows.draws).nonzero()[0]
        prompt_tokens, prompt_targets = [NO_IDS], [NO_IDS]
        for index in (np.flatnonzero(requested[rows.verified :]) + rows.verified).tolist():
            request = self._running[rows.slots.slots.item(index)]
            start, end = rows.starts.item(index), rows.ends.item(index)
            indices, targets = _prompt_targets(request, start, end)
            if len(targets) and not rows.draws[index]:
                selected = np.append(selected, index)
            prompt_tokens.append(indices + query_start[index])
            prompt_targets.append(targets)
        if not len(selected):
            return None
        selected.sort()
        slots = rows.slots.slots[selected]
        named = [self._named.get(slot, ()) for slot in slots.tolist()] if self._named else []
        return LogprobsRequest(
            rows=selected.astype(np.int32),
            logprobs=self._logprobs[slots],
            top=self._top[slots],
            named_starts=np.cumsum([0, *map(len, named or [()] * len(slots))], dtype=np.int32),
            named_ids=np.array([token for ids in named for token in ids], np.int32),
            hidden=self._hidden[slots],
            prompt_tokens=np.concatenate(prompt_tokens).astype(np.int32, copy=False),
            prompt_targets=np.concatenate(prompt_targets).astype(np.int32, copy=False),
        )

    def sampled(self, slots: SlotSet, details: LogprobsBatch, index: Indices) -> Floats:
        """The logprobs of the tokens that rows `index` have sampled, (R,); NaN if not requested."""
        requested = self._logprobs[slots.at] & self.requested[slots.at]
        values = np.full(len(slots), np.nan, np.float32)
        last = details.starts[1:][index][requested] - 1
        values[requested] = details.logprobs[last]
        return values

    def accepted(
        self, request: Request, outcome: StepOutcome, row: int, count: int
    ) -> Floats | None:
        """The logprobs of the `count` tokens that a row accepted, (N,); None if not requested."""
        slot, details = request.slot, outcome.details
        if details is None or not (self.requested[slot] and self._logprobs[slot]):
            return None
        end = details.starts.item(row + 1)
        return details.logprobs[end - count : end]


def pooling_request(requests: Sequence[Request], rows: StepRows) -> PoolingRequest | None:
    """The pooling of these rows of prompts; None if the model generates tokens."""
    if requests[0].state.sampling.pool is None:
        return None
    prompts = np.array([request.prompt_tokens for request in requests])
    params = [request.state.sampling.pool for request in requests]
    return PoolingRequest(
        ends=rows.ends == prompts,
        dimensions=np.array([(pool and pool.dimensions) or 0 for pool in params], np.int32),
    )


def token_types(requests: Sequence[Request], rows: StepRows) -> Ints | None:
    """1 for each token of the second text of a pair, (T,); None if no row has one."""
    pools = [request.state.sampling.pool for request in requests]
    seconds = [None if pool is None else pool.second_from for pool in pools]
    if not any(second is not None for second in seconds):
        return None
    types: list[Flags] = []
    for row, second in enumerate(seconds):
        start, end = rows.starts.item(row), rows.ends.item(row)
        types.append(np.arange(start, end) >= (end if second is None else second))
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
            request.add_outputs(TokenOutputs(count=1, token_ids=_NO_TOKEN, pooled=pooled), 0)
    elif outcome.details is not None:
        start, end = outcome.details.starts[row : row + 2].tolist()
        params = request.state.sampling.details
        if params is not None and end > start:
            prompt_entries = end - start - accepted
            tokens = slice(start, start + prompt_entries + kept)
            if tokens.start == tokens.stop:
                return
            outputs = _requested(outcome.details, tokens, params)
            if outcome.times is not None:
                first, last = outcome.times.starts[row : row + 2].tolist()
                times = _bytes(outcome.times.values[first:last])
                outputs = msgspec.structs.replace(outputs, times=times)
            request.add_outputs(outputs, prompt_entries)


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


def _prompt_targets(request: Request, start: int, end: int) -> tuple[Ints, Ints]:
    """The tokens of a prefill row after which a prompt token is scored, and these tokens."""
    first = max(request.prompt_logprob_cursor, start + 1)
    last = min(end + 1, request.prompt_tokens)
    indices = np.arange(first - 1, last - 1, dtype=np.int32) - start
    targets = request.ids(first, max(first, last))
    if request.scores and end == request.prompt_tokens:
        indices = np.append(indices, np.int32(end - 1 - start))
        targets = np.append(targets, np.int32(-1))
    return indices, targets


def _bytes(values: Ints | Floats) -> bytes:
    little = "<i4" if values.dtype == np.int32 else "<f4"
    return values.astype(little, copy=False).tobytes()
