"""What is told of tokens beside their ids: asked of a plan, and taken from its outcome."""

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
    """Refuse what cannot be told here.

    Raises:
        InvalidRequest: A named token is not in the vocabulary.
        Unsupported: This server returns no hidden states.
    """
    wanted = sampling.details
    if wanted is None:
        return
    check_ids(wanted.named_ids, vocab_size, "details.named_ids")
    if wanted.hidden and not hidden_states:
        text = "this server returns no hidden states; batching.hidden_states switches them on"
        raise Unsupported(text, param="details.hidden")


class LogprobsSlots:
    """Which of the requests that have slots are told of, by slot."""

    def __init__(self) -> None:
        self._wanted: dict[int, TokenOutputParams] = {}

    @property
    def idle(self) -> bool:
        """Whether nobody is told of."""
        return not self._wanted

    def fill(self, request: Request) -> None:
        """Write down what the request that has just got its slot asks for."""
        if request.state.sampling.details is not None:
            self._wanted[request.slot] = request.state.sampling.details

    def clear(self, slot: int) -> None:
        """The request in a slot is gone."""
        self._wanted.pop(slot, None)

    def request(self, rows: Sequence[BatchRow], query_start: Ints) -> LogprobsRequest | None:
        """What the plan of these rows is asked to tell; None if it is nothing."""
        if not self._wanted:
            return None
        telling: list[int] = []
        prompt_tokens: list[Ints] = []
        prompt_targets: list[Ints] = []
        for index, row in enumerate(rows):
            if row.request.slot not in self._wanted:
                continue
            places, targets = _prompt(row)
            if row.draws or len(targets):
                telling.append(index)
                prompt_tokens.append(places + query_start[index])
                prompt_targets.append(targets)
        if not telling:
            return None
        wanted = [self._wanted[rows[index].request.slot] for index in telling]
        return LogprobsRequest(
            rows=np.array(telling, np.int32),
            logprobs=np.array([params.logprobs for params in wanted], np.bool_),
            top=np.array([params.top for params in wanted], np.int32),
            named_starts=np.cumsum([0, *(len(p.named_ids) for p in wanted)], dtype=np.int32),
            named_ids=np.array([i for params in wanted for i in params.named_ids], np.int32),
            hidden=np.array([params.hidden for params in wanted], np.bool_),
            prompt_tokens=np.concatenate(prompt_tokens).astype(np.int32, copy=False),
            prompt_targets=np.concatenate(prompt_targets).astype(np.int32, copy=False),
        )


@dataclass(frozen=True, slots=True)
class LogprobsReader:
    """What an outcome tells of the tokens of one row."""

    details: LogprobsBatch
    row: int

    @classmethod
    def of(cls, details: LogprobsBatch, row: int) -> LogprobsReader | None:
        """None if nothing is told of this row."""
        if details.starts[row] == details.starts[row + 1]:
            return None
        return cls(details, row)

    def write_to(self, request: Request, *, accepted: int, kept: int) -> None:
        """Give the row's request what it asked for.

        Of so many tokens that the row accepted, the request kept the first `kept`: the one that
        ended it is not part of the answer, and nothing follows it.
        """
        params = request.state.sampling.details
        if params is not None:
            start, end = self.details.starts[self.row : self.row + 2].tolist()
            prompt_entries = end - start - accepted
            tokens = slice(start, start + prompt_entries + kept)
            request.tell(_wanted(self.details, tokens, params), prompt_entries)


def _wanted(details: LogprobsBatch, tokens: slice, params: TokenOutputParams) -> TokenOutputs:
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


def _prompt(row: BatchRow) -> tuple[Ints, Ints]:
    """Which tokens of a row are followed by a token of the prompt to tell of, and by which."""
    request = row.request
    first = max(request.told, row.start + 1)
    last = min(row.end + 1, request.prompt_tokens)
    places = np.arange(first - 1, last - 1, dtype=np.int32) - row.start
    targets = request.ids[first : max(first, last)]
    if request.scores and row.end == request.prompt_tokens:
        places = np.append(places, np.int32(row.end - 1 - row.start))
        targets = np.append(targets, np.int32(-1))
    return places, targets


def _bytes(values: Ints | Floats | NDArray[np.float32]) -> bytes:
    little = "<i4" if values.dtype == np.int32 else "<f4"
    return values.astype(little, copy=False).tobytes()
