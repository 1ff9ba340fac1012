"""Weights that nobody trained: to measure speed and memory of a model by its config alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from antiphon.model_worker.model.formats.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from antiphon.layers.weights import WeightSource

DEVIATION = 0.02
"""Of the weights: what most models are initialised with, so that no number runs away."""


@dataclass(frozen=True, slots=True)
class DummyTensor:
    """A tensor drawn from its own name: the same whoever draws it, in whichever order."""

    name: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * torch.float32.itemsize

    def prefetch(self) -> None:
        """Nothing: no disk has it."""

    def read(self) -> Tensor:
        """Draw a matrix; the vectors are what leaves a signal as it is."""
        if len(self.shape) == 1:
            return torch.full(self.shape, 0.0 if self.name.endswith("bias") else 1.0)
        digest = hashlib.sha256(self.name.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        return torch.empty(self.shape).normal_(0.0, DEVIATION, generator=generator)

    def release(self) -> None:
        """Nothing: what was drawn goes when nobody holds it."""


def dummy_weights(sources: Iterable[WeightSource]) -> dict[str, StoredTensor]:
    """Every tensor that a model takes."""
    return {
        source.name: StoredTensor(
            Path("dummy"),
            source.shape,
            torch.float32,
            DummyTensor(source.name, source.shape),
            lambda taken: taken,
        )
        for source in sources
    }
