"""The plan of a step from its rows."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.alignment import alignment_request
from antiphon.model_worker.batching.logprobs import pooling_request, token_types
from antiphon.model_worker.batching.plan import StepPlan, future

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.model_worker.batching.plan import Floats, Ints, Longs, SamplingPart
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.rows import StepRows
    from antiphon.model_worker.batching.running_batch import RunningBatch


def build_plan(
    step: int, rows: StepRows, batch: RunningBatch, part: SamplingPart | None
) -> StepPlan:
    """The plan of these rows, in their order; `part` is None if it follows."""
    slots, count = rows.slots.slots, len(rows)
    kv_len = rows.ends.astype(np.int32)
    if rows.decodes == count:
        tokens = batch.next_tokens(rows)
        query_len, query_start = _one_each(count)
        logit_tokens = query_start
    else:
        tokens = _tokens(rows, batch)
        query_len = kv_len - rows.starts.astype(np.int32)
        query_end = np.cumsum(query_len, dtype=np.int32)
        query_start, logit_tokens = query_end - query_len, _last_each(query_end, rows.logit_counts)
    pooling, types, next_tokens = None, None, None
    spliced, spliced_rows, axis_tokens, axis_positions = None, None, None, None
    ahead, sources, source_slots, alignment = None, None, None, None
    if rows.draft_counts is not None:
        next_tokens = np.zeros(count, np.int32)
    if rows.verified < count:
        chunks = [batch.running[slot] for slot in slots[rows.verified :].tolist()]
        if next_tokens is not None:
            next_tokens[rows.verified :] = _next_tokens(chunks, rows.ends[rows.verified :])
        spliced, spliced_rows = _splices(chunks, rows, query_start)
        axis_tokens, axis_positions = _axes(chunks, rows, query_start)
        if batch.source_shape is not None:
            sources, source_slots = _sources(chunks, rows, batch.source_shape)
            alignment = alignment_request(chunks, rows)
        if spliced is not None and batch.span_tokens is not None:
            ahead = _ahead(chunks, rows, query_start, len(tokens))
        if (pooling := pooling_request(chunks, rows)) is not None:
            types = token_types(chunks, rows)
    return StepPlan(
        step=step,
        slot=slots,
        query_start=query_start,
        query_len=query_len,
        kv_len=kv_len,
        tokens=tokens,
        logit_tokens=logit_tokens,
        states=rows.states,
        part=part,
        details=batch.logprobs.request(rows, query_start),
        pooling=pooling,
        token_types=types,
        future_start=rows.future_start,
        draft_counts=rows.draft_counts,
        next_tokens=next_tokens,
        spliced=spliced,
        spliced_rows=spliced_rows,
        position_offsets=batch.position_offset[slots] if batch.offsets else None,
        axis_tokens=axis_tokens,
        axis_positions=axis_positions,
        sources=sources,
        source_slots=source_slots,
        ahead=ahead,
        alignment=alignment,
        changes=batch.changes.read(),
    )


@cache
def _one_each(rows: int) -> tuple[Ints, Ints]:
    """Lengths and starts of rows of one token each, (R,); shared by many plans."""
    lengths, starts = np.ones(rows, np.int32), np.arange(rows, dtype=np.int32)
    lengths.flags.writeable = starts.flags.writeable = False
    return lengths, starts


def _tokens(rows: StepRows, batch: RunningBatch) -> Ints:
    """The tokens of all rows, (T,), where some have several."""
    tokens = [batch.next_tokens(rows)]
    for row in range(rows.decodes, len(rows)):
        slot, start, end = rows.slots.slots.item(row), rows.starts.item(row), rows.ends.item(row)
        if row < rows.verified:
            known = start < batch.length.item(slot)
            last = batch.last_token.item(slot) if known else future(slot)
            tokens += np.array([last], np.int32), rows.drafts[row - rows.decodes]
        else:
            tokens.append(batch.running[slot].ids(start, end))
    return np.concatenate(tokens).astype(np.int32, copy=False)


def _next_tokens(chunks: Iterable[Request], ends: Longs) -> list[int]:
    """The token after each chunk, (R,); 0 where it is to be sampled."""
    return [
        chunk.ids(end, end + 1).item() if end < chunk.length else 0
        for chunk, end in zip(chunks, ends.tolist(), strict=True)
    ]


def _splices(
    chunks: Sequence[Request], rows: StepRows, query_start: Ints
) -> tuple[Ints | None, Floats | None]:
    """The spliced tokens of these rows of prompts, and their rows: (E,) and (E, H), or None."""
    indices: list[Ints] = []
    embeddings: list[Floats] = []
    for row, request in enumerate(chunks, start=rows.verified):
        if request.media is None:
            continue
        start, end = rows.starts.item(row), rows.ends.item(row)
        for places, found in request.media.rows(start, end):
            indices.append(places + np.int32(query_start.item(row) - start))
            embeddings.append(found)
    if not indices:
        return None, None
    return np.concatenate(indices), np.concatenate(embeddings)


def _axes(
    chunks: Sequence[Request], rows: StepRows, query_start: Ints
) -> tuple[Ints | None, Ints | None]:
    """The tokens of these rows of prompts up to the last image of each, and their positions.

    (A,) and (3, A), or None: see `StepPlan`.
    """
    indices: list[Ints] = []
    positions: list[Ints] = []
    for row, request in enumerate(chunks, start=rows.verified):
        if request.media is None:
            continue
        start, end = rows.starts.item(row), rows.ends.item(row)
        found = request.media.positions[:, start:end]
        if count := found.shape[1]:
            at = query_start.item(row)
            indices.append(np.arange(at, at + count, dtype=np.int32))
            positions.append(found)
    if not indices:
        return None, None
    return np.concatenate(indices), np.concatenate(positions, axis=1)


def _sources(
    chunks: Sequence[Request], rows: StepRows, shape: tuple[int, int]
) -> tuple[Floats | None, Ints | None]:
    """What those of these requests attend to that begin here, and their slots, or None.

    It has `shape` (S, hidden), and is zero for a request without media.
    """
    begun = [
        request
        for row, request in enumerate(chunks, start=rows.verified)
        if rows.starts.item(row) == request.found_tokens
    ]
    if not begun:
        return None, None
    none = np.zeros(shape, np.float32)
    found = [none if each.media is None else each.media.source() for each in begun]
    return np.stack(found), np.array([each.slot for each in begun], np.int32)


def _ahead(chunks: Sequence[Request], rows: StepRows, query_start: Ints, tokens_count: int) -> Ints:
    """How many tokens after it each token attends to, (T,): those of images are in the pass."""
    ahead = np.zeros(tokens_count, np.int32)
    for row, request in enumerate(chunks, start=rows.verified):
        if request.media is None:
            continue
        start, end = rows.starts.item(row), rows.ends.item(row)
        for first, last in request.media.spans:
            if first < end and start < last:
                assert last <= end, "a chunk ends within an image"
                at = query_start.item(row) + max(first, start) - start
                count = last - max(first, start)
                ahead[at : at + count] = np.arange(count - 1, -1, -1)
    return ahead


def _last_each(ends: Ints, counts: Longs) -> Ints:
    """The last `counts` (R,) indices before each of `ends` (R,)."""
    if not np.count_nonzero(counts > 1):  # no drafts
        return ends[counts > 0] - 1
    first = ends - np.cumsum(counts)
    return np.array(np.repeat(first, counts) + np.arange(counts.sum()), np.int32)
