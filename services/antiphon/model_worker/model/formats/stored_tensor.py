"""One tensor of a checkpoint, described before it is read."""

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
    """The data of one tensor. Any thread may read it."""

    @property
    def size_bytes(self) -> int:
        """Bytes to read."""
        ...

    def prefetch(self) -> None:
        """Start reading ahead; returns before it is done."""
        ...

    def read(self) -> Tensor:
        """Read the data into memory. The result must not be written to."""
        ...

    def release(self) -> None:
        """Release memory that the result of `read` does not own."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: its type and location.

    Attributes:
        file: The file that contains it.
        shape: As the model needs it.
        dtype: Of the decoded elements.
        data: Its bytes.
        decode: Decodes bytes, (…,)  ->  `shape`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: TensorData
    decode: Callable[[Tensor], Tensor]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
