"""Where tokens are in the audio that they attend to, by the weights of cross attention.

A prompt is run by itself, without a cache: kernels return what attention makes of values, and not
its weights. Tokens are found in their order.

Source: Radford et al. 2022, arXiv:2212.04356, and the word timestamps of OpenAI's program,
https://github.com/openai/whisper, `timing.py`; Sakoe and Chiba 1978, dynamic time warping.

Axes: P tokens of a prompt, N the last of them, which are aligned, S tokens of the encoder, M the
first of them, with which they are, H heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn import functional

from antiphon.model_worker.batching.plan import AlignmentRequest, Floats, Ints, PooledVectors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.layers.context import AttentionParams


class RunsAlone(Protocol):
    """Runs the layers of a model on a sequence (P,), which attends to what `cross` has."""

    def __call__(self, tokens: Ints, cross: AlignmentPass) -> None: ...


def align(wanted: AlignmentRequest, rows: int, run: RunsAlone, dtype: torch.dtype) -> PooledVectors:
    """Where the aligned tokens of each of a plan's `rows` begin, in tokens of the encoder.

    `dtype` is that of the model.
    """
    counts, values = np.zeros(rows, np.int32), list[Floats]()
    for index, row in enumerate(wanted.rows.tolist()):
        tokens = _part(wanted.tokens, wanted.token_starts, index)
        heads = defaultdict[int, list[int]](list)
        for layer, head in _part(wanted.heads, wanted.head_starts, index).tolist():
            heads[layer].append(head)
        counts[row] = count = wanted.counts.item(index)
        cross = AlignmentPass(
            torch.as_tensor(wanted.sources[index]).to(dtype),
            heads,
            first=len(tokens) - count,
            source_tokens=wanted.source_tokens.item(index),
            filter_width=wanted.filter_widths.item(index),
        )
        run(tokens, cross)
        values.append(warped(-cross.matrix.double().numpy()).astype(np.float32))
    starts = np.cumsum([0, *counts.tolist()], dtype=np.int32)
    return PooledVectors(starts=starts, values=np.concatenate(values))


class AlignmentPass:
    """A `CrossAttentionBackend` of one prompt, whose tokens from `first` on are aligned.

    Attributes:
        sources: (S, hidden), in the dtype of the model.
    """

    def __init__(
        self,
        source: Tensor,
        heads: Mapping[int, Sequence[int]],
        *,
        first: int,
        source_tokens: int,
        filter_width: int,
    ) -> None:
        self.sources = source
        self._heads = heads
        self._first, self._source_tokens, self._width = first, source_tokens, filter_width
        self._cached: tuple[Tensor, Tensor] | None = None
        self._sum, self._count = torch.zeros(()), 0

    @property
    def matrix(self) -> Tensor:
        """How much more than others each token attends to each of the encoder, (N, M)."""
        return self._sum / self._count

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        del layer  # it attends next
        self._cached = keys.float(), values.float()

    def attend(self, layer: int, queries: Tensor, scale: float) -> Tensor:
        assert self._cached is not None, "a layer that has stored its keys"
        read, (keys, values) = queries.float(), self._cached
        if heads := [*self._heads.get(layer, ())]:
            # Of these alone, and of aligned tokens: those of all would take 50 MB a layer.
            weights = torch.einsum("nhd,shd->hns", read[self._first :, heads], keys[:, heads])
            for each in (weights * scale).softmax(dim=-1):
                self._add(each[:, : self._source_tokens])
        q, k, v = (each.transpose(0, 1)[None] for each in (read, keys, values))  # (1, H, ., D)
        mixed = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        return mixed[0].transpose(0, 1).to(queries.dtype)

    def _add(self, weights: Tensor) -> None:
        """Add a head, whose weights (N, M) are compared between tokens: all alike are zero."""
        deviation, mean = torch.std_mean(weights, dim=0, correction=0, keepdim=True)
        compared = (weights - mean) / deviation.clamp_min(_TINY)
        self._sum = self._sum + _smoothed(compared, self._width)
        self._count += 1


def attend_to_prompt(layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
    """An `AttentionBackend` of a whole prompt by itself, whose positions are in its embeddings."""
    del layer
    queries = heads.shape[1] - 2 * params.kv_heads
    assert queries == params.kv_heads, "multi-head attention"
    assert params.rotary is None, "a model whose positions are embedded"
    q, k, v = (  # (H, P, D)
        heads[:, first : first + queries].transpose(0, 1).float()
        for first in (0, queries, 2 * queries)
    )
    made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=params.scale)
    return made.transpose(0, 1).to(heads.dtype)


def warped(costs: NDArray[np.float64]) -> Ints:
    """Where each row begins on the cheapest path through costs (N, M)  ->  (N,) columns.

    The path leads from the first row and column to the last ones, by steps of one row, one column,
    or both. What is reached by as many steps is computed at once: an anti-diagonal. Between equal
    ways the one from the column before is taken, as in the source.
    """
    rows, columns = costs.shape
    width = columns + 1
    padded = np.zeros((rows + 1, width))
    padded[1:, 1:] = costs
    each, sums = padded.ravel(), np.full(padded.size, np.inf, np.float32)
    sums[0] = 0.0
    ways = np.zeros(padded.size, np.int8)
    for steps in range(2, rows + columns + 1):
        first, last = max(1, steps - columns), min(rows, steps - 1)
        at, length = first * width + steps - first, (last - first) * columns + 1
        both, before_row, before_column = (
            sums[at - far : at - far + length : columns] for far in (width + 1, width, 1)
        )
        by_both = (both < before_row) & (both < before_column)
        by_row = (before_row < both) & (before_row < before_column)
        least = np.where(by_both, both, np.where(by_row, before_row, before_column))
        here = slice(at, at + length, columns)
        sums[here] = each[here] + least
        ways[here] = np.where(by_both, _BOTH, np.where(by_row, _ROW, _COLUMN))
    starts = np.zeros(rows, np.int32)
    row, column = rows, columns
    while row and column:
        starts[row - 1] = column - 1
        way = ways.item(row * width + column)
        row, column = row - (way != _COLUMN), column - (way != _ROW)
    return starts


_BOTH, _ROW, _COLUMN = 0, 1, 2
_TINY = torch.finfo(torch.float32).tiny


def _smoothed(weights: Tensor, width: int) -> Tensor:
    """The median of each `width` neighbours in a row of weights (N, M), mirrored at its ends.

    Of two more than half of them, the least and the greatest cannot be it: they are left out, and
    the next one is taken in, until one is left. All rows are compared at once: a sort of each seven
    took six times as long (58 ms, of 448 x 1,500 weights on one thread).
    """
    half, count = width // 2, weights.shape[-1]
    if count <= half:
        return weights
    mirrored = functional.pad(weights, (half, half), mode="reflect")
    following = (mirrored[..., first : first + count] for first in range(width))
    kept = [*islice(following, half + 2)]
    while len(kept) > 1:
        kept = [*_between(kept), *islice(following, 1)]
    return kept[0]


def _between(values: Sequence[Tensor]) -> list[Tensor]:
    """All but the least and the greatest of values (each of one shape), element by element."""
    least, *others = values
    above = list["Tensor"]()
    for each in others:
        above.append(torch.maximum(least, each))
        least = torch.minimum(least, each)
    greatest, *others = above
    below = list["Tensor"]()
    for each in others:
        below.append(torch.minimum(greatest, each))
        greatest = torch.maximum(greatest, each)
    return below


def _part(values: Ints, starts: Ints, index: int) -> Ints:
    return values[starts.item(index) : starts.item(index + 1)]
