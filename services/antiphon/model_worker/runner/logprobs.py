"""Logprobs and hidden states per token: requested in the step plan, read from its outcome.

Axes: T tokens of the plan, R rows, L rows of logits, V vocabulary, D rows that request logprobs,
K tokens that get logprobs, N the widest top-k, M the most named ids of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.model_worker.batching.plan import (
    Floats,
    Ints,
    LogprobsBatch,
    LogprobsRequest,
    Longs,
    StepPlan,
)
from antiphon.model_worker.runner.sampling import is_random
from antiphon.resolve.memory import PROMPT_LOGITS_BYTES_MAX, prompt_logits_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.kernels.upload import Upload


@dataclass(frozen=True, slots=True)
class LogprobsComputer:
    """Computes the logprobs and hidden states that a plan's rows request."""

    ops: Ops
    logit_bytes_max: int = PROMPT_LOGITS_BYTES_MAX
    upload: Upload = torch.as_tensor

    def compute(
        self,
        plan: StepPlan,
        hidden: Tensor,
        logits: Tensor,
        head: Callable[[Tensor], Tensor],
        accepted: tuple[Ints, Ints],
    ) -> LogprobsBatch | None:
        """Compute what a plan's rows request of their tokens; None if no row requests anything.

        Args:
            plan: The plan that ran.
            hidden: (T, hidden), normalised.
            logits: (L, V) float32, after logits processors.
            head: (rows, hidden) -> (rows, V) logits.
            accepted: (R + 1,) where each row's accepted tokens begin, and these tokens.
        """
        wanted = plan.details
        if wanted is None:
            return None
        entries = _entries(plan, wanted, *accepted)
        named = _named(wanted)
        tokens, top = len(entries.row), int(wanted.top.max(initial=0))
        batch = LogprobsBatch(
            starts=np.searchsorted(entries.row, np.arange(len(plan.slot) + 1)).astype(np.int32),
            token_ids=entries.token_ids,
            logprobs=np.full(tokens, np.nan, np.float32),
            top_ids=np.full((tokens, top), -1, np.int32),
            top_logprobs=np.full((tokens, top), np.nan, np.float32),
            named_logprobs=np.full((tokens, named.shape[1]), np.nan, np.float32),
            hidden=self._states(hidden, entries.place) if wanted.hidden.any() else None,
        )
        requested = wanted.logprobs | (wanted.top > 0) | (np.diff(wanted.named_starts) > 0)
        scored = requested[entries.request_row]

        def fill(part: Longs, logits: Tensor, temperature: Floats) -> None:
            _fill(batch, self, part, logits, temperature, named[entries.request_row[part]])

        sampled = np.flatnonzero(scored & (entries.logit >= 0))
        if len(sampled):
            rows = self.upload(entries.logit[sampled])
            columns = plan.sampling
            temperature = np.where(is_random(columns), columns.temperature, np.float32(1))
            fill(sampled, logits[rows], temperature[entries.row[sampled]])
        prompt = np.flatnonzero(scored & (entries.logit < 0))
        rows_max = prompt_logits_rows(logits.shape[-1], self.logit_bytes_max)
        for first in range(0, len(prompt), rows_max):
            part = prompt[first : first + rows_max]
            rows = self.upload(entries.place[part])
            fill(part, head(hidden[rows]), np.ones(len(part), np.float32))
        return batch

    def _states(self, hidden: Tensor, places: Longs) -> Floats:
        return hidden[self.upload(places)].float().cpu().numpy()


@dataclass(frozen=True, slots=True)
class _Entries:
    """The tokens that get logprobs, in the order of the outcome.

    Attributes:
        row: (K,) row of the plan.
        request_row: (K,) index into the rows that request logprobs.
        place: (K,) index into the plan's tokens of the one before it, which predicts it.
        token_ids: (K,)
        logit: (K,) its row of logits; -1 for prompt tokens.
    """

    row: Longs
    request_row: Longs
    place: Longs
    token_ids: Ints
    logit: Longs


def _fill(
    batch: LogprobsBatch,
    computer: LogprobsComputer,
    entries: Longs,
    logits: Tensor,
    temperature: Floats,
    named: Ints,
) -> None:
    """Fill in these entries of a batch, each from its own row of `logits` (E, V)."""
    upload = computer.upload
    scale = upload(temperature)[:, None]
    mass = computer.ops.logsumexp(logits, scale[:, 0])[:, None]

    def at(ids: Ints) -> NDArray[np.float32]:
        """The logprobs of (E, n) ids; NaN for -1."""
        index = upload(ids.astype(np.int64))
        values = logits.gather(-1, index.clamp(min=0)) / scale - mass
        return values.masked_fill(index < 0, torch.nan).cpu().numpy()

    batch.logprobs[entries] = at(batch.token_ids[entries, np.newaxis])[:, 0]
    if batch.named_logprobs.shape[1]:
        batch.named_logprobs[entries] = at(named)
    if top := min(batch.top_ids.shape[1], logits.shape[-1]):
        most_likely = logits.topk(top, dim=-1)
        batch.top_ids[entries, :top] = most_likely.indices.int().cpu().numpy()
        batch.top_logprobs[entries, :top] = (most_likely.values / scale - mass).cpu().numpy()


def _entries(plan: StepPlan, wanted: LogprobsRequest, starts: Ints, token_ids: Ints) -> _Entries:
    token_row = np.repeat(np.arange(len(plan.slot)), plan.query_len)
    logit_row = token_row[plan.logit_tokens]
    request_rows = np.full(len(plan.slot), -1, np.int64)
    request_rows[wanted.rows] = np.arange(len(wanted.rows))
    # A row accepts a prefix of the tokens sampled from its rows of logits.
    number = np.arange(len(logit_row)) - np.searchsorted(logit_row, logit_row)
    accepted = np.flatnonzero(
        (number < np.diff(starts)[logit_row]) & (request_rows[logit_row] >= 0)
    )
    prompt_row, row = token_row[wanted.prompt_tokens], logit_row[accepted]
    rows = np.concatenate([prompt_row, row])
    order = np.argsort(rows, kind="stable")  # within a row, prompt tokens precede sampled ones
    rows = rows[order]
    sampled = token_ids[starts[row] + number[accepted]]
    places = np.concatenate([wanted.prompt_tokens, plan.logit_tokens[accepted]])
    return _Entries(
        row=rows,
        request_row=request_rows[rows],
        place=places[order].astype(np.int64),
        token_ids=np.concatenate([wanted.prompt_targets, sampled])[order].astype(np.int32),
        logit=np.concatenate([np.full(len(prompt_row), -1), accepted])[order],
    )


def _named(wanted: LogprobsRequest) -> Ints:
    """The named ids of each row that requests logprobs, (D, M), -1 beyond a row's own."""
    counts = np.diff(wanted.named_starts)
    named = np.full((len(counts), int(counts.max(initial=0))), -1, np.int32)
    named[np.arange(named.shape[1]) < counts[:, np.newaxis]] = wanted.named_ids
    return named
