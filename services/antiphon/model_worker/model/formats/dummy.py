"""Random weights: to measure speed and memory of a model from its config alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from antiphon.model_worker.model.formats.stored_tensor import StoredTensor, unchanged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from antiphon.layers.weights import WeightSource

DEVIATION = 0.02
"""Standard deviation of the weights: most models are initialised with it, so nothing diverges."""


@dataclass(frozen=True, slots=True)
class DummyTensor:
    """A random tensor seeded by its name, so that order and rank do not matter."""

    name: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * torch.float32.itemsize

    def prefetch(self) -> None:
        pass

    def read(self) -> Tensor:
        """Generate the tensor: random if a matrix; a vector keeps a signal unchanged."""
        if len(self.shape) == 1:
            return torch.full(self.shape, 0.0 if self.name.endswith("bias") else 1.0)
        digest = hashlib.sha256(self.name.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        return torch.empty(self.shape).normal_(0.0, DEVIATION, generator=generator)

    def release(self) -> None:
        pass


def dummy_weights(sources: Iterable[WeightSource]) -> dict[str, StoredTensor]:
    file, dtype = Path("dummy"), torch.float32
    return {
        source.name: StoredTensor(
            file, source.shape, dtype, DummyTensor(source.name, source.shape), unchanged
        )
        for source in sources
    }
