"""What is applied to token embeddings before the first layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from antiphon.layers.embedding import LearnedPositions, TokenTypes
from antiphon.layers.norm import build_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.context import ForwardContext
    from antiphon.layers.weights import BuildContext, WeightSource
    from antiphon.model_worker.model.spec import ModelSpec


class EmbeddingTransform:
    """Scale, token-type embeddings, position embeddings and norm, as far as a model has them."""

    def __init__(self, spec: ModelSpec, build: BuildContext) -> None:
        embedding = spec.embedding
        # The scale is rounded to the dtype of the embeddings, as in transformers.
        self._scale = float(torch.tensor(embedding.scale, dtype=build.dtype))
        self._types = self._positions = self._norm = None
        if embedding.types is not None:
            self._types = TokenTypes(embedding.types, embedding.types_count, spec.hidden, build)
        if embedding.positions is not None:
            self._positions = LearnedPositions(
                embedding.positions,
                spec.context_tokens,
                embedding.positions_first,
                spec.hidden,
                build,
            )
        if embedding.norm is not None:
            self._norm = build_norm(embedding.norm, embedding.norm_name, spec.hidden, build)

    @property
    def plain(self) -> bool:
        """Whether the model has none of these."""
        parts = (self._types, self._positions, self._norm)
        return self._scale == 1.0 and all(part is None for part in parts)

    @property
    def operations(self) -> frozenset[str]:
        """Names of the kernels that it calls."""
        return frozenset[str]() if self._norm is None else self._norm.operations

    def __call__(self, ctx: ForwardContext, embedded: Tensor) -> Tensor:
        """Make the residual stream from embeddings (T, hidden)  ->  (T, hidden)."""
        if self._scale != 1.0:
            embedded = embedded * self._scale
        if self._types is not None:
            embedded = self._types.add(ctx, embedded)
        if self._positions is not None:
            embedded = self._positions.add(ctx, embedded)
        return embedded if self._norm is None else self._norm(ctx, embedded)

    def sources(self) -> Iterator[WeightSource]:
        """The tensors to load."""
        for part in (self._types, self._positions, self._norm):
            if part is not None:
                yield from part.sources()
