"""What a layer wants from a checkpoint, said before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from antiphon.layers.methods import LinearMethod
    from antiphon.layers.quantization.storage import CheckpointQuantization, StorageLayout
    from antiphon.layers.tp import Tp

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What weights are in that are stored as they are."""
ANY = -1
"""A length of an axis that nobody knows before."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One tensor of a checkpoint and the layer that takes it.

    Attributes:
        name: As the checkpoint calls it.
        shape: Of the whole tensor, whatever part of it this rank keeps; a length may be `ANY`.
        load: Copies this rank's part of the whole tensor into place.
        dtypes: Number formats that it may have.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is one; a single number may have no axis."""
        found = shape or (1,)
        pairs = zip(found, self.shape, strict=False)
        return len(found) == len(self.shape) and all(want in (have, ANY) for have, want in pairs)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What every layer is built with: where its weights live, and which part of them.

    `quantization` says which linears the checkpoint stores otherwise than in plain numbers; unset:
    none. `cache_dtype` is what keys and values are kept in; unset: what the model computes in.
    """

    tp: Tp
    dtype: torch.dtype
    device: torch.device
    quantization: CheckpointQuantization | None = None
    cache_dtype: torch.dtype | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        """Number format of keys and values in the cache."""
        return self.cache_dtype or self.dtype

    def storage(self, name: str) -> StorageLayout | None:
        """How a linear of the checkpoint is stored; None: in plain numbers."""
        return None if self.quantization is None else self.quantization.storage(name)

    def method(self, names: Iterable[str], plain: LinearMethod) -> LinearMethod:
        """What keeps a linear made of the checkpoint's: `plain` if one of them is stored so."""
        if self.quantization is None or any(self.storage(name) is None for name in names):
            return plain
        return self.quantization.method

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


def replicated_source(name: str, weight: Tensor) -> Iterator[WeightSource]:
    """The source of a weight that every rank keeps whole."""
    yield WeightSource(name, tuple(weight.shape), lambda tensor: void(weight.copy_(tensor)))


def void(_: Tensor) -> None:
    """Drop the result of an in-place operation, so that a lambda returns nothing."""
