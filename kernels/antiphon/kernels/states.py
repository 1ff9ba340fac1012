"""The rows of a pass as layers with a recurrent state see them.

A state is never written over: a row reads the one that stands after the tokens before it, and
writes the one that stands after its own tokens to another place. What a pass writes depends on the
pass alone, so that one that failed can be run again, and a state that others may still want to go
on from stays what it was.

Axes: R rows, T tokens of all rows, B rows of one token, S places of states.
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
"""Scans go in chunks of so many tokens, counted from a sequence's first token and not from a
row's: a prompt that is cut at a multiple of this is computed in the same pieces as a whole one."""
SPAN_TOKENS = 8 * CHUNK_TOKENS
"""Chunks that are computed side by side. More would take memory and no longer less time."""

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """What a recurrent layer keeps of a whole sequence.

    Attributes:
        channels: Inputs of its convolution that are cut over ranks.
        shared: Inputs of it that `groups` share out; with fewer groups than ranks they are copied.
        groups: Of the heads.
        taps: Of the convolution: it keeps one token fewer.
        heads: Matrices of the recurrence, cut over ranks.
        rows, columns: Of one matrix.
    """

    channels: int
    shared: int = 0
    groups: int = 1
    taps: int
    heads: int
    rows: int
    columns: int

    def convolved(self, ranks: int) -> tuple[int, int]:
        """The inputs that the convolution keeps, on one of `ranks` ranks: (tokens, channels)."""
        return self.taps - 1, self.channels // ranks + self.shared // min(ranks, self.groups)

    def matrices(self, ranks: int) -> tuple[int, int, int]:
        """The state of the recurrence, on one of `ranks` ranks."""
        return self.heads // ranks, self.rows, self.columns

    def state_bytes(self, ranks: int, dtype: torch.dtype) -> int:
        """Of one state in one layer, on one rank; the recurrence is kept in float32."""
        kept = math.prod(self.convolved(ranks)) * dtype.itemsize
        return kept + math.prod(self.matrices(ranks)) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Where one layer keeps its states.

    Attributes:
        group: Index among the groups of states: which rows of a pass it sees.
        convolved: (S, K - 1, C) the last inputs of the convolution.
        matrices: (S, H, I, J) float32, the state of the recurrence.
    """

    group: int
    conv_states: Tensor
    recurrent_states: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of one token, which take one step of the recurrence side by side.

    Attributes:
        tokens: (B,) indices into the pass's tokens; None when they are all of them, in order.
        reads: (B,) places; 0 where nothing was computed before.
        writes: (B,) places.
        fresh: (B,) bool, whose state is zero; None: nobody's.
        pairs: The places again, read and written, as the plan has them.
    """

    tokens: Tensor | None
    reads: Tensor
    writes: Tensor
    fresh: Tensor | None
    pairs: tuple[tuple[int, int], ...]

    def gather(self, x: Tensor) -> Tensor:
        """The entries of these rows: x (T, ...)  ->  (B, ...)."""
        return x if self.tokens is None else x.index_select(0, self.tokens)

    def read_states(self, states: Tensor) -> Tensor:
        """A copy of the states that they go on from: states (S, ...)  ->  (B, ...)."""
        found = states.index_select(0, self.reads)
        if self.fresh is not None:
            # Not by a product: what lies at the place of nobody's state may be anything.
            found[self.fresh] = 0
        return found

    def write_states(self, states: Tensor, after: Tensor) -> None:
        """Write the states that follow: after (B, ...), states (S, ...), mutated."""
        states.index_copy_(0, self.writes, after.to(states.dtype))

    def decayed_states(self, states: Tensor, factors: Tensor) -> Iterator[Tensor]:
        """The state of each row in turn, at its new place and already multiplied.

        One row after the other, because a state is large: what is done to one finds it in the
        processor's cache. All rows side by side took three times as long with states of 786 KB.

        states (S, ...), mutated; factors (B, ...)  ->  B times (...), to be changed in place
        """
        for (read, write), factor in zip(self.pairs, factors, strict=True):
            after = states[write]
            if read < 0:
                after.zero_()
            else:
                torch.mul(states[read], factor, out=after)
            yield after

    def scatter(self, out: Tensor, y: Tensor) -> None:
        """Write the results of these rows: y (B, ...), out (T, ...), mutated."""
        if self.tokens is None:
            out.copy_(y)
        else:
            out.index_copy_(0, self.tokens, y.to(out.dtype))


@dataclass(frozen=True, slots=True)
class ScanSpan:
    """A row of several tokens, or a span of it that fits the same chunks.

    Attributes:
        begin: Index of its first token in the pass's tokens.
        end: Index after its last one.
        read: Place of the state before it; negative: it is zero.
        write: Place of the state after it.
        offset: Tokens of its first chunk that come before it.
    """

    begin: int
    end: int
    read: int
    write: int
    offset: int

    def initial_state(self, states: Tensor) -> Tensor:
        """The state that it goes on from: states (S, ...)  ->  (...)."""
        return torch.zeros_like(states[self.write]) if self.read < 0 else states[self.read]

    def chunked(self, x: Tensor) -> Tensor:
        """Bring its entries into chunks: x (T, ...)  ->  (chunks, tokens of a chunk, ...).

        What belongs to no token of the run is zero. A run within one chunk is not filled up.
        """
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
    """The rows of one pass. Made once a pass, used by each layer.

    Row r's tokens follow those of row r - 1.

    Attributes:
        reads: (R,) where the state after the tokens before the row lies; negative: there are none.
        writes: (R,) where the state after the row's last token goes. Nobody reads it in this pass.
        query_len: (R,) tokens of a row in this pass.
        kv_len: (R,) tokens of its sequence up to the end of the row.
    """

    reads: Ints
    writes: Ints
    query_len: Ints
    kv_len: Ints

    @cached_property
    def decode_rows(self) -> DecodeRows | None:
        """The rows of one token, if there are any."""
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
        """The rows of more tokens, cut into spans that follow each other."""
        runs: list[ScanSpan] = []
        begin = 0
        for row, length in enumerate(self.query_len.tolist()):
            if length > 1:
                start = int(self.kv_len[row]) - length
                runs += _spans(begin, length, start, int(self.reads[row]), int(self.writes[row]))
            begin += length
        return tuple(runs)


def _spans(begin: int, length: int, start: int, read: int, write: int) -> list[ScanSpan]:
    """Cut a row of a sequence's tokens from `start` on where spans of chunks end."""
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
