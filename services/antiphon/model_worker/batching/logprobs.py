"""Logprobs and hidden states per token: requested in the step plan, read from its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.logits import check_ids
from antiphon.model_worker.batching.plan import LogprobsRequest
from antiphon.wire.errors import Unsupported
from antiphon.wire.token_outputs import TokenOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from antiphon.model_worker.batching.builder import BatchRow
    from antiphon.model_worker.batching.plan import Floats, Ints, LogprobsBatch
    from antiphon.model_worker.batching.request import Request
    from antiphon.wire.sampling import SamplingParams, TokenOutputParams


def check_logprobs(sampling: SamplingParams, vocab_size: int, *, hidden_states: bool) -> None:
    """Reject token outputs that this worker cannot return.

    Raises:
        InvalidRequest: A named token is not in the vocabulary.
        Unsupported: Hidden states are disabled.
    """
    params = sampling.details
    if params is None:
        return
    check_ids(params.named_ids, vocab_size, "details.named_ids")
    if params.hidden and not hidden_states:
        text = (
            "hidden states are disabled; start the worker with --enable-return-hidden-states"
            " (batching.hidden_states)"
        )
        raise Unsupported(text, param="details.hidden")


class LogprobsSlots:
    """The requested token outputs of running requests, by slot."""

    def __init__(self) -> None:
        self._params: dict[int, TokenOutputParams] = {}

    @property
    def idle(self) -> bool:
        """Whether no running request asks for token outputs."""
        return not self._params

    def fill(self, request: Request) -> None:
        """Store the parameters of a request that was given a slot."""
        if request.state.sampling.details is not None:
            self._params[request.slot] = request.state.sampling.details

    def clear(self, slot: int) -> None:
        """Clear a slot."""
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


@dataclass(frozen=True, slots=True)
class LogprobsReader:
    """Reads the token outputs of one row from an outcome."""

    details: LogprobsBatch
    row: int

    @classmethod
    def of(cls, details: LogprobsBatch, row: int) -> LogprobsReader | None:
        """The reader of a row; None if it has no token outputs."""
        if details.starts[row] == details.starts[row + 1]:
            return None
        return cls(details, row)

    def write_to(self, request: Request, *, accepted: int, kept: int) -> None:
        """Write the requested token outputs to the row's request.

        Of the `accepted` tokens of the row only the first `kept` are part of the output: a stop
        token and what follows it are not.
        """
        params = request.state.sampling.details
        if params is not None:
            start, end = self.details.starts[self.row : self.row + 2].tolist()
            prompt_entries = end - start - accepted
            tokens = slice(start, start + prompt_entries + kept)
            request.tell(_requested(self.details, tokens, params), prompt_entries)


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


def _bytes(values: Ints | Floats | NDArray[np.float32]) -> bytes:
    little = "<i4" if values.dtype == np.int32 else "<f4"
    return values.astype(little, copy=False).tobytes()
