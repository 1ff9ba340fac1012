"""Builds step plans: the rows of a batch as flat arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import StepPlan, future
from antiphon.model_worker.batching.pooling import pooling_request, token_types
from antiphon.model_worker.batching.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.layout import Layout
    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.slots import Slots


class BatchRow(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request that a plan computes: `[start, start + length)`.

    Attributes:
        draws: Whether a token is sampled after it: not after a prefill chunk within a prompt.
        life: The generation of the request when the row was made; if the request's has changed
            since, the outcome of the row is dropped.
    """

    request: Request
    start: int
    length: int
    draws: bool
    life: int

    @classmethod
    def launched(cls, request: Request, end: int) -> BatchRow:
        """Make the next row of a request, up to `end`, and mark it as launched."""
        start, expected = request.planned, request.length + request.ahead
        if end > request.length:
            request.ids[request.length : end] = future(request.slot)
        draws = end == expected and not request.scores
        row = cls(request, start, end - start, draws, request.life)
        request.launch(end, draws=draws)
        return row

    @property
    def end(self) -> int:
        """Tokens that the row's last query attends to, itself included."""
        return self.start + self.length

    @property
    def current(self) -> bool:
        """Whether the request still waits for the outcome of this row."""
        return self.life == self.request.life

    def repeat(self) -> None:
        """Note that the row runs once more: progress of its request counts from its start."""
        self.request.began = self.start


def build_plan(step: int, rows: Sequence[BatchRow], slots: Slots) -> StepPlan:
    """Build the plan of these rows, in the order given. Their requests must have their slots."""
    layout = slots.layout(rows)
    tokens, positions, kv_len = _decodes(rows) if layout.decodes else _chunks(rows, layout)
    processors = slots.logits_processors
    masks = masked = penalties = biases = None
    if not processors.idle:
        masks, masked = processors.masks(rows)
        penalties = processors.penalties(rows, layout.slot, layout.draws)
        biases = processors.biases(rows)
    pooling = None if layout.decodes else pooling_request(rows)
    return StepPlan(
        step=step,
        slot=layout.slot,
        query_start=layout.query_start,
        query_len=layout.query_len,
        kv_len=kv_len,
        adapter=layout.adapter,
        tokens=tokens,
        positions=positions,
        logit_tokens=layout.logit_tokens,
        sampling=layout.sampling,
        page_tables=_page_tables(rows, layout.slot, slots),
        penalties=penalties,
        token_masks=masks,
        token_mask_rows=masked,
        biases=biases,
        details=slots.logprobs.request(rows, layout.query_start),
        pooling=pooling,
        token_types=None if pooling is None else token_types(rows),
        release_fence=step,
    )


def _decodes(rows: Sequence[BatchRow]) -> tuple[Ints, Ints, Ints]:
    """`_chunks` for rows of one token each, in one array for all."""
    tokens = [row.request.ids.item(row.start) for row in rows]
    starts = [row.start for row in rows]
    ends = [start + 1 for start in starts]
    columns = np.array((tokens, starts, ends), np.int32)
    return columns[0], columns[1:2], columns[2]


def _chunks(rows: Sequence[BatchRow], layout: Layout) -> tuple[Ints, Ints, Ints]:
    """Tokens and positions of all rows, and the KV length at the end of each row."""
    start = np.array([row.start for row in rows], np.int32)
    tokens = np.concatenate([row.request.ids[row.start : row.end] for row in rows])
    positions = layout.index + start[layout.row]
    return tokens, positions[np.newaxis, :], start + layout.query_len


def _page_tables(rows: Sequence[BatchRow], slot: Ints, slots: Slots) -> tuple[Ints, ...]:
    """The page tables by group; for a state group, the states that each row reads and writes."""
    first = rows[0].request.table
    assert first is not None, "a running request has no pages"
    tables = slots.page_tables(slot)
    if not first.chains:
        return tables
    tables = list(tables)
    for group in first.chains:
        pairs = [
            row.request.table.chains[group].pair(row.start)
            for row in rows
            if row.request.table is not None
        ]
        tables[group] = np.array(pairs, np.int32)
    return tuple(tables)
