"""From rows to the flat arrays of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import Plan
from antiphon.model_worker.batching.pooling import pool_rows, token_types
from antiphon.model_worker.batching.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.slots import Slots


class Row(msgspec.Struct, frozen=True):
    """The tokens of one request that a plan computes: `[start, start + length)`.

    Attributes:
        draws: Whether a token is drawn after it: a chunk in the middle of a prompt draws none.
        life: The request's when the row was made; of another life its outcome says nothing.
    """

    request: Request
    start: int
    length: int
    draws: bool
    life: int

    @property
    def end(self) -> int:
        """Tokens that the row's last query attends to, itself included."""
        return self.start + self.length

    @property
    def current(self) -> bool:
        """Whether its request still waits for its outcome."""
        return self.life == self.request.life

    def repeat(self) -> None:
        """It is run once more: what is counted of its request is counted from here."""
        self.request.began = self.start


def build_plan(step: int, rows: Sequence[Row], slots: Slots) -> Plan:
    """Lay the rows out, in the order given. None of their requests has lost its slot."""
    slot = np.array([row.request.slot for row in rows], np.int32)
    query_len = np.array([row.length for row in rows], np.int32)
    start = np.array([row.start for row in rows], np.int32)
    draws = np.array([row.draws for row in rows], np.bool_)
    kv_len = start + query_len
    query_end = np.cumsum(query_len, dtype=np.int32)
    query_start = query_end - query_len
    tokens = np.concatenate([row.request.ids[row.start : row.end] for row in rows])
    # Position of a token: its index in the plan, shifted by how far its row lies from there.
    positions = np.arange(len(tokens), dtype=np.int32)
    positions += np.repeat(start - query_start, query_len)
    masks, masked = slots.steering.masks(rows)
    pooling = pool_rows(rows)
    return Plan(
        step=step,
        slot=slot,
        query_start=query_start,
        query_len=query_len,
        kv_len=kv_len,
        adapter=np.full(len(rows), -1, np.int32),
        tokens=tokens,
        positions=positions[np.newaxis, :],
        logit_tokens=(query_end - 1)[draws],
        sampling=slots.sampling(slot),
        page_tables=_page_tables(rows, slot, slots),
        penalties=slots.steering.penalties(rows, slot, draws),
        token_masks=masks,
        token_mask_rows=masked,
        biases=slots.steering.biases(rows),
        details=slots.telling.rows(rows, query_start),
        pooling=pooling,
        token_types=None if pooling is None else token_types(rows),
        release_fence=step,
    )


def _page_tables(rows: Sequence[Row], slot: Ints, slots: Slots) -> tuple[Ints, ...]:
    """The page tables by group; of states, what each row reads and what it writes."""
    tables = list(slots.page_tables(slot))
    first = rows[0].request.table
    assert first is not None, "a running request has no pages"
    for group in first.chains:
        pairs = [
            row.request.table.chains[group].pair(row.start)
            for row in rows
            if row.request.table is not None
        ]
        tables[group] = np.array(pairs, np.int32)
    return tuple(tables)
