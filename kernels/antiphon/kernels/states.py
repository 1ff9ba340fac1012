"""The rows of a forward pass for layers with a recurrent state.

A state is never overwritten: a row reads the state after the tokens before it, and writes the state
after its own tokens to another place. What a pass writes depends on the pass alone, so that a
failed pass can be run again, and a cached state that other requests may continue from is not
changed.

Axes: R rows, T tokens of all rows, B rows of one token, S states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_TOKENS = 64
"""Chunk size of scans, aligned to a sequence's first token and not to a row's: a prefill split at a
multiple of this is computed in the same chunks as an unsplit one."""
SPAN_TOKENS = 8 * CHUNK_TOKENS
"""Chunks that are computed in parallel. More would take memory without saving time."""

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The state that a recurrent layer stores for a whole sequence."""

    channels: int  # inputs of its convolution that are sharded over ranks
    shared: int = 0  # its inputs that are sharded by `groups`, or replicated over more ranks
    groups: int = 1  # of the heads
    taps: int  # of the convolution: it stores one token fewer
    heads: int  # matrices of the recurrence, sharded over ranks
    rows: int  # of one matrix
    columns: int

    def convolved(self, ranks: int) -> tuple[int, int]:
        """The shape of the convolution's state, on one of `ranks` ranks: (tokens, channels)."""
        return self.taps - 1, self.channels // ranks + self.shared // min(ranks, self.groups)

    def matrices(self, ranks: int) -> tuple[int, int, int]:
        return self.heads // ranks, self.rows, self.columns

    def state_bytes(self, ranks: int, dtype: torch.dtype) -> int:
        kept = math.prod(self.convolved(ranks)) * dtype.itemsize
        return kept + math.prod(self.matrices(ranks)) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer."""

    group: int  # index of its group of recurrent states, which selects the rows' metadata
    conv_states: Tensor  # (S, K - 1, C) the last inputs of the convolution
    recurrent_states: Tensor  # (S, H, I, J) float32, the state of the recurrence


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of one token, which each take one step of the recurrence."""

    # (B,) indices into the pass's tokens; None when they are all of them, in order.
    tokens: Tensor | None
    reads: Tensor  # (B,) state indices; 0 for rows without earlier tokens
    writes: Tensor  # (B,) state indices
    fresh: Tensor | None  # (B,) bool, rows that start from a zero state; None: no row does
    # The state indices to read (negative: none) and to write, as in the plan.
    pairs: tuple[tuple[int, int], ...]

    def gather(self, x: Tensor) -> Tensor:
        """The entries of these rows: x (T, ...)  ->  (B, ...)."""
        return x if self.tokens is None else x.index_select(0, self.tokens)

    def read_states(self, states: Tensor) -> Tensor:
        """A copy of the states that the rows continue from: states (S, ...)  ->  (B, ...)."""
        found = states.index_select(0, self.reads)
        if self.fresh is not None:
            # Assigned, not multiplied by zero: index 0 stands in here and may contain a NaN.
            found[self.fresh] = 0
        return found

    def write_states(self, states: Tensor, after: Tensor) -> None:
        states.index_copy_(0, self.writes, after.to(states.dtype))

    def decayed_states(self, states: Tensor, factors: Tensor) -> Iterator[Tensor]:
        """The state of each row in turn, copied to its new index and multiplied by its decay.

        One row after the other: a state is large, and the caller's update finds it in the CPU
        cache. Doing all rows in parallel took three times as long with states of 786 KB.

        states (S, ...), mutated; factors (B, ...)  ->  B times (...), to be updated in place
        """
        for (read, write), factor in zip(self.pairs, factors, strict=True):
            after = states[write]
            if read < 0:
                after.zero_()
            else:
                torch.mul(states[read], factor, out=after)
            yield after

    def scatter(self, out: Tensor, y: Tensor) -> None:
        if self.tokens is None:
            out.copy_(y)
        else:
            out.index_copy_(0, self.tokens, y.to(out.dtype))


@dataclass(frozen=True, slots=True)
class ScanSpan:
    """A row of several tokens, or a span of it that starts at a multiple of `SPAN_TOKENS`.

    It is the pass's tokens from `begin` to `end`.
    """

    begin: int
    end: int
    read: int  # index of the state before it; negative: it is zero
    write: int  # index of the state after it
    offset: int  # tokens of its first chunk that come before it

    def initial_state(self, states: Tensor) -> Tensor:
        """The state that it continues from: states (S, ...)  ->  (...)."""
        return torch.zeros_like(states[self.write]) if self.read < 0 else states[self.read]

    def chunked(self, x: Tensor) -> Tensor:
        """Split its entries into chunks: x (T, ...)  ->  (chunks, tokens of a chunk, ...)."""
        # Padding is zero. A span within one chunk is not padded.
        own = x[self.begin : self.end]
        end = self.offset + len(own)
        if end <= CHUNK_TOKENS:
            return own.unsqueeze(0)
        chunks = -(-end // CHUNK_TOKENS)
        padded = own.new_zeros((chunks * CHUNK_TOKENS, *own.shape[1:]))
        padded[self.offset : end] = own
        return padded.view(chunks, CHUNK_TOKENS, *own.shape[1:])

    def unchunked(self, y: Tensor) -> Tensor:
        """Undo `chunked`: y (chunks, tokens of a chunk, ...)  ->  (tokens, ...)."""
        length = self.end - self.begin
        flat = y.flatten(0, 1)
        return flat if len(flat) == length else flat[self.offset : self.offset + length]


@dataclass(frozen=True)
class StateMetadata:
    """The rows of one forward pass. Made once a pass, used by each layer.

    Row r's tokens follow those of row r - 1.
    """

    reads: Ints  # (R,) index of the state after the tokens before the row; negative: there are none
    # (R,) index for the state after the row's last token; no row of this pass reads it.
    writes: Ints
    query_len: Ints  # (R,) tokens of a row in this pass
    kv_len: Ints  # (R,) tokens of its sequence up to the end of the row

    @cached_property
    def decode_rows(self) -> DecodeRows | None:
        rows = np.flatnonzero(self.query_len == 1)
        if not len(rows):
            return None
        starts = np.cumsum(self.query_len, dtype=np.int64) - self.query_len
        reads = self.reads[rows].astype(np.int64)
        fresh = reads < 0
        return DecodeRows(
            tokens=None if len(rows) == len(self.reads) else torch.as_tensor(starts[rows]),
            reads=torch.as_tensor(np.maximum(reads, 0)),
            writes=torch.as_tensor(self.writes[rows].astype(np.int64)),
            fresh=torch.as_tensor(fresh) if fresh.any() else None,
            pairs=tuple(zip(self.reads[rows].tolist(), self.writes[rows].tolist(), strict=True)),
        )

    @cached_property
    def scan_spans(self) -> tuple[ScanSpan, ...]:
        runs: list[ScanSpan] = []
        begin = 0
        for row, length in enumerate(self.query_len.tolist()):
            if length > 1:
                start = int(self.kv_len[row]) - length
                runs += _spans(begin, length, start, int(self.reads[row]), int(self.writes[row]))
            begin += length
        return tuple(runs)


def _spans(begin: int, length: int, start: int, read: int, write: int) -> list[ScanSpan]:
    """Split a row that begins at token `start` of its sequence at multiples of `SPAN_TOKENS`."""
    ends = range((start // SPAN_TOKENS + 1) * SPAN_TOKENS, start + length, SPAN_TOKENS)
    cuts = [start, *ends, start + length]
    return [
        ScanSpan(
            begin=begin + here - start,
            end=begin + there - start,
            read=read if here == start else write,
            write=write,
            offset=here % CHUNK_TOKENS,
        )
        for here, there in pairwise(cuts)
    ]
