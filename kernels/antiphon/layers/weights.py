"""The checkpoint tensors that a layer loads, declared before anything is read."""

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
"""Dtypes of weights that are not quantized."""
ANY = -1
"""A length that is not known in advance."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One tensor of a checkpoint and the layer that loads it.

    Attributes:
        name: In the checkpoint.
        shape: Of the whole tensor, whatever part of it this rank has; a length may be `ANY`.
        load: Copies this rank's part of the whole tensor.
        dtypes: Allowed dtypes.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape matches; a scalar may have no axis."""
        found = shape or (1,)
        pairs = zip(found, self.shape, strict=False)
        return len(found) == len(self.shape) and all(want in (have, ANY) for have, want in pairs)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The context in which every layer is built: the rank, dtype and device of its weights.

    `quantization` gives the linears that the checkpoint quantizes; unset: none. `cache_dtype` is
    the dtype of the KV cache; unset: that of the model.
    """

    tp: Tp
    dtype: torch.dtype
    device: torch.device
    quantization: CheckpointQuantization | None = None
    cache_dtype: torch.dtype | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of keys and values in the cache."""
        return self.cache_dtype or self.dtype

    def storage(self, name: str) -> StorageLayout | None:
        """The storage layout of a linear of the checkpoint; None: not quantized."""
        return None if self.quantization is None else self.quantization.storage(name)

    def method(self, names: Iterable[str], plain: LinearMethod) -> LinearMethod:
        """The method of a linear made of these: `plain`, unless all of them are quantized."""
        if self.quantization is None or any(self.storage(name) is None for name in names):
            return plain
        return self.quantization.method

    def empty(self, *size: int) -> Tensor:
        """Allocate a weight, uninitialised."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def share(self, size: int, what: str) -> int:
        """This rank's share of a dimension.

        Raises:
            ValueError: It is not divisible by the number of ranks.
        """
        if size % self.tp.ranks:
            raise ValueError(f"{what}: {size} is not divisible by {self.tp.ranks} ranks")
        return size // self.tp.ranks


def replicated_source(name: str, weight: Tensor) -> Iterator[WeightSource]:
    """The source of a weight that is replicated on every rank."""
    yield WeightSource(name, tuple(weight.shape), lambda tensor: void(weight.copy_(tensor)))


def void(_: Tensor) -> None:
    """Drop the result of an in-place operation, so that a lambda returns nothing."""
