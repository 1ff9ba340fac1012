"""What a layer wants from a checkpoint, said before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from antiphon.layers.tp import Tp


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One tensor of a checkpoint and the layer that takes it.

    Attributes:
        name: As the checkpoint calls it.
        shape: Of the whole tensor, whatever part of it this rank keeps.
        load: Copies this rank's part of the whole tensor into place.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer is built with: where its weights live, and which part of them."""

    tp: Tp
    dtype: torch.dtype
    device: torch.device

    def empty(self, *size: int) -> Tensor:
        """Room for a weight, not yet loaded."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def share(self, size: int, what: str) -> int:
        """This rank's part of a dimension.

        Raises:
            ValueError: The ranks cannot cut it evenly.
        """
        if size % self.tp.ranks:
            raise ValueError(f"{what}: {size} cannot be cut evenly over {self.tp.ranks} ranks")
        return size // self.tp.ranks


def whole(name: str, weight: Tensor) -> Iterator[WeightSource]:
    """The source of a weight that every rank keeps whole."""
    yield WeightSource(name, tuple(weight.shape), lambda tensor: void(weight.copy_(tensor)))


def void(_: Tensor) -> None:
    """Drop the result of an in-place operation, so that a lambda returns nothing."""
