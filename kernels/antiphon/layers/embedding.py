"""Token ids to vectors and back, the vocabulary cut over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.layers.weights import Build, WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.context import ForwardContext


class VocabularyTable:
    """A vector a token: the input embedding, the output head, or both when they are tied.

    Each rank holds an equal run of the vocabulary; the last may be padded, with logits cut off.
    """

    def __init__(self, name: str, vocabulary: int, hidden: int, build: Build) -> None:
        self.name = name
        self._vocabulary, self._hidden = vocabulary, hidden
        self._share = -(-vocabulary // build.tp.ranks)
        self._first = build.tp.rank * self._share
        self._weight = build.empty(self._share, hidden)

    def embed(self, ctx: ForwardContext, tokens: Tensor) -> Tensor:
        """Look up tokens (T,) int64  ->  (T, hidden)."""
        if ctx.tp.ranks == 1:
            return F.embedding(tokens, self._weight)
        local = tokens - self._first
        foreign = (local < 0) | (local >= self._share)
        rows = F.embedding(local.masked_fill(foreign, 0), self._weight)
        return ctx.tp.all_reduce(rows.masked_fill(foreign[:, None], 0.0))

    def logits(self, ctx: ForwardContext, hidden: Tensor) -> Tensor:
        """Score hidden (L, hidden)  ->  (L, V) float32, on every rank."""
        local = F.linear(hidden, self._weight).float()
        return ctx.tp.all_gather(local)[:, : self._vocabulary]

    def sources(self) -> Iterator[WeightSource]:
        """Its weight."""
        shape = (self._vocabulary, self._hidden)
        yield WeightSource(f"{self.name}.weight", shape, self._load)

    def _load(self, tensor: Tensor) -> None:
        part = tensor[self._first : self._first + self._share]
        self._weight[: len(part)].copy_(part)
        self._weight[len(part) :].zero_()
