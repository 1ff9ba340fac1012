"""The bytes of files, memory-mapped or copied."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats import page_hints as pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from antiphon.model_worker.model.formats.stored_tensor import TensorData

    Part = Callable[[int, int], TensorData]
    """Returns a part of a file by its first byte and its size in bytes."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A part of a mapped file. Its memory is the page cache: there is no copy."""

    view: Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of the part."""
        return self.view.nbytes

    def prefetch(self) -> None:
        """Start reading ahead."""
        pages.prefetch(self.view)

    def read(self) -> Tensor:
        """Read the pages into memory."""
        pages.populate(self.view)
        return self.view

    def release(self) -> None:
        """Drop the pages; a later access reads them again."""
        pages.drop(self.view)


@dataclass(frozen=True, slots=True)
class Copied:
    """A part of a file, read into memory of its own."""

    file: Path
    start: int
    size_bytes: int

    def prefetch(self) -> None:
        """Start reading ahead, where the system supports it."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError), self.file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), self.start, self.size_bytes, os.POSIX_FADV_WILLNEED)

    def read(self) -> Tensor:
        """Copy the part.

        Raises:
            ModelLoadError: The file has become shorter, or cannot be read.
        """
        copy = torch.empty(self.size_bytes, dtype=torch.uint8)
        rest, at = copy.numpy().data, self.start
        try:
            with self.file.open("rb", buffering=0) as stream:
                while rest:
                    count = os.preadv(stream.fileno(), [rest], at)
                    if count == 0:
                        raise ModelLoadError(f"{self.file}: cut short while it was read, at {at}")
                    rest, at = rest[count:], at + count
        except OSError as error:
            raise ModelLoadError(f"{self.file}: {error.strerror}") from error
        return copy

    def release(self) -> None:
        """Do nothing: a copy is freed with its last reference."""


def open_file(file: Path, *, mapped: bool) -> Part:
    """Open a file and return a function that gives its parts, mapped or copied.

    Raises:
        ModelLoadError: It cannot be read.
    """
    if not mapped:
        return lambda start, size: Copied(file, start, size)
    try:
        with file.open("rb") as stream:
            # Copy-on-write, since torch has no read-only tensors; nothing is written.
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    whole = torch.frombuffer(content, dtype=torch.uint8)
    return lambda start, size: Mapped(whole[start : start + size])


def numbers(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """View bytes (N,) as elements of a shape; copied if the file does not align them."""
    aligned = data if data.data_ptr() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(shape)
