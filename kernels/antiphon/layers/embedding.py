"""Token embedding and output head, with the vocabulary sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.layers.linear import LinearPart, kernels_of, multiply, weight_sources
from antiphon.layers.methods import LinearMethod, LinearShape, RankSlice, TiledWeights
from antiphon.layers.weights import BuildContext, Module, WeightSource, replicated_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.layers.context import ForwardContext


class VocabParallelEmbedding(Module):
    """A vector for each token: the input embedding, the output head, or both when they are tied.

    Each rank has an equal range of the vocabulary; the last range may be padded, and the logits of
    the padding are cut off.
    """

    def __init__(
        self,
        name: str,
        vocabulary: int,
        hidden: int,
        build: BuildContext,
        method: LinearMethod,
        *,
        bias: bool = False,
    ) -> None:
        self.name = name
        self._bias = bias
        self._vocabulary, self._hidden = vocabulary, hidden
        self._share = -(-vocabulary // build.tp.ranks)
        self._first = build.tp.rank * self._share
        self._build = build
        shape = LinearShape(hidden, self._share, bias)
        self._weights = build.create((name,), shape, method, hidden, table=True)
        self.kernels = kernels_of(self._weights)

    def embed(self, ctx: ForwardContext, tokens: Tensor) -> Tensor:
        """Look up tokens (T,) int64  ->  (T, hidden)."""
        if ctx.tp.ranks == 1:
            return self._weights.rows(tokens)
        local = tokens - self._first
        foreign = (local < 0) | (local >= self._share)
        rows = self._weights.rows(local.masked_fill(foreign, 0))
        return ctx.tp.all_reduce(rows.masked_fill(foreign[:, None], 0.0))

    def logits(self, ctx: ForwardContext, hidden: Tensor) -> Tensor:
        """Logits of hidden states (L, hidden)  ->  (L, V) float32, contiguous, on every rank."""
        if isinstance(self._weights, TiledWeights):
            local = multiply(ctx, self._weights, hidden).float()
        else:
            local = self._weights.apply_wide(hidden)
        if ctx.tp.ranks == 1:
            return local
        return ctx.tp.all_gather(local)[:, : self._vocabulary].contiguous()

    @property
    def packed(self) -> CompiledLinear | None:
        return self._weights.packed if self._build.tp.ranks == 1 else None

    @property
    def table(self) -> Tensor | None:
        return self._weights.table if self._build.tp.ranks == 1 else None

    def sources(self) -> Iterator[WeightSource]:
        part = LinearPart(self.name, self._vocabulary, shards=1)
        cut = RankSlice(slice(self._first, self._first + self._share), slice(None), into=0)
        yield from weight_sources(part, self._hidden, cut, self._build, self._weights)
        if self._bias:
            yield WeightSource(
                f"{self.name}.bias",
                (self._vocabulary,),
                lambda tensor: self._weights.load("bias", tensor, cut),
            )


class AddedEmbedding(Module):
    """A table whose rows are added to the embeddings of tokens; replicated on every rank.

    Learned positions, whose first token of a text has row `first`, or token types.
    """

    def __init__(
        self, name: str, rows: int, hidden: int, build: BuildContext, *, first: int = 0
    ) -> None:
        self._name, self._first = name, first
        self._weight = build.empty(first + rows, hidden)

    @property
    def table(self) -> Tensor:
        """The rows from the first one on."""
        return self._weight[self._first :]

    def add(self, embedded: Tensor, index: Tensor | None) -> Tensor:
        """Add the row of each token, by its index (T,); None: the first row."""
        if index is None:
            return embedded + self._weight[self._first]
        return embedded + self.table.index_select(0, index)

    def sources(self) -> Iterator[WeightSource]:
        return replicated_source(f"{self._name}.weight", self._weight)
