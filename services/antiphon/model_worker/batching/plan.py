"""A step as data: the plan that every rank executes, and the outcome that the loop commits.

The plan is a rank's only input. It is flat int32 arrays, so that a broadcast is a few copies and
a recorded plan can be replayed offline. The outcome is ragged: a row may accept several tokens
(speculation), one, or none (a prefill chunk), and the loop never assumes one.

Axes: R rows, T tokens of all rows, A position axes (3 for M-RoPE, else 1), L rows of logits,
N pages of the longest row, S accepted tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]


def future(slot: int) -> int:
    """A token that is not known on the host yet: what `slot` sampled in the step before.

    Negative, so that it is never a token id; the rank reads it from its own last result.
    """
    return -1 - slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """How each row's token is drawn; entry r belongs to row r.

    `top_k` 0 keeps the whole vocabulary; `temperature` 0 is greedy.
    """

    temperature: Floats  # (R,)
    top_p: Floats  # (R,)
    min_p: Floats  # (R,)
    top_k: Ints  # (R,)
    seed: Longs  # (R,)
    choice: Ints  # (R,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMove:
    """Bring a page of a cache group in before the step, or put it out after."""

    group: int
    page: int
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Splice:
    """Take the embeddings of tokens [start, start + length) of this plan from a buffer."""

    start: int
    length: int
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One forward pass.

    Attributes:
        step: Grows by one; a rank refuses a gap.
        slot: The request slot of each row, fixed while a choice runs.
        query_start: Index of a row's first token in `tokens`.
        query_len: Tokens of a row in this pass: decode 1, verify k + 1, a prefill chunk n.
        kv_len: Tokens that the row's last query attends to, itself included.
        adapter: Index of the row's adapter, -1 without one.
        tokens: Token ids, or `future(slot)`.
        positions: Of each token, an axis a row.
        logit_tokens: Indices into `tokens` whose logits are wanted; any number a row.
        page_tables: (R, N) a cache group, -1 beyond a row's pages. Token p of a row lies in page
            `table[r, p // page_tokens]` at `p % page_tokens`; the pass writes its own there first.
        tree_mask: For tree verification: (T, T), which tokens of the pass see which.
        release_fence: Pages released by this plan may be reused by plans after this step.
    """

    step: int
    microbatch: int = 0
    slot: Ints  # (R,)
    query_start: Ints  # (R,)
    query_len: Ints  # (R,)
    kv_len: Ints  # (R,)
    adapter: Ints  # (R,)
    tokens: Ints  # (T,)
    positions: Ints  # (A, T)
    logit_tokens: Ints  # (L,)
    sampling: SamplingColumns
    page_tables: tuple[Ints, ...]
    tree_mask: NDArray[np.bool_] | None = None
    splices: tuple[Splice, ...] = ()
    loads: tuple[PageMove, ...] = ()
    saves: tuple[PageMove, ...] = ()
    release_fence: int = 0


class RowStatus(IntEnum):
    """What became of a row."""

    OK = 0
    NON_FINITE = 1
    """Its logits held a NaN or infinity; the request ends with an error, the batch goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a pass produced. Row r accepted `token_ids[starts[r]:starts[r + 1]]`."""

    step: int
    starts: Ints  # (R + 1,)
    token_ids: Ints  # (S,)
    status: Ints  # (R,)
    logprobs: Floats | None = field(default=None)  # (S,)
    drafts: Ints | None = field(default=None)  # (R, k)
