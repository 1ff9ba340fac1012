"""From rows to the flat arrays of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.plan import Plan, SamplingColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.request import Request


_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one request that a plan computes: `[start, start + length)`."""

    request: Request
    start: int
    length: int

    @property
    def end(self) -> int:
        """Tokens that the row's last query attends to, itself included."""
        return self.start + self.length

    @property
    def draws(self) -> bool:
        """Whether a token is drawn after it: a chunk in the middle of a prompt draws none."""
        return self.end == self.request.length


def build_plan(step: int, rows: Sequence[Row], groups: int) -> Plan:
    """Lay the rows out, in the order given."""
    query_len = np.array([row.length for row in rows], np.int32)
    kv_len = np.array([row.end for row in rows], np.int32)
    query_end = np.cumsum(query_len, dtype=np.int32)
    query_start = query_end - query_len
    draws = np.array([row.draws for row in rows], np.bool_)
    tokens = np.concatenate([row.request.ids[row.start : row.end] for row in rows])
    # Position of a token: its index in the plan, shifted by how far its row lies from there.
    shift = np.repeat(kv_len - query_end, query_len)
    positions = np.arange(len(tokens), dtype=np.int32) + shift
    return Plan(
        step=step,
        slot=np.array([row.request.slot for row in rows], np.int32),
        query_start=query_start,
        query_len=query_len,
        kv_len=kv_len,
        adapter=np.full(len(rows), -1, np.int32),
        tokens=tokens,
        positions=positions[np.newaxis, :],
        logit_tokens=(query_end - 1)[draws],
        sampling=_sampling(rows),
        page_tables=tuple(_page_table(rows, group) for group in range(groups)),
        release_fence=step,
    )


def _sampling(rows: Sequence[Row]) -> SamplingColumns:
    states = [row.request.state for row in rows]
    params = [state.sampling for state in states]
    return SamplingColumns(
        # Greedy is written one way, so that the runner has one thing to look for.
        temperature=np.array([0 if p.greedy else p.temperature for p in params], np.float32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        top_k=np.array([min(p.top_k, _INT32_MAX) for p in params], np.int32),
        seed=np.array([p.seed for p in params], np.int64),
        choice=np.array([state.choice for state in states], np.int32),
    )


def _page_table(rows: Sequence[Row], group: int) -> Ints:
    tables = [row.request.table for row in rows]
    pages = [[] if table is None else table.pages(group) for table in tables]
    width = max(map(len, pages))
    array = np.full((len(rows), width), -1, np.int32)
    for index, row_pages in enumerate(pages):
        array[index, : len(row_pages)] = row_pages
    return array
