"""One tensor of a checkpoint, known before it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch import Tensor


class TensorData(Protocol):
    """Where the numbers of one tensor are. Any thread may read them."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are read."""
        ...

    def prefetch(self) -> None:
        """Have the disk begin to read them; returns before it is done."""
        ...

    def read(self) -> Tensor:
        """Bring them into memory. What is returned is not written to."""
        ...

    def release(self) -> None:
        """Give memory back that what was read does not hold by itself."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: what it is, and where.

    Attributes:
        file: That holds it.
        shape: As the model wants it.
        dtype: Of the numbers that reading gives.
        data: Its bytes.
        decode: Makes the numbers of the bytes, (…,)  ->  `shape`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: TensorData
    decode: Callable[[Tensor], Tensor]

    @property
    def count(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)
