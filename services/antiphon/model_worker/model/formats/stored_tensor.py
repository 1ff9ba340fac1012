"""Tensors of a checkpoint, described before they are read, and the bytes of their files."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# `MADV_POPULATE_READ` of Linux 5.14, which the `mmap` module does not define; older kernels refuse
# it, and pages are then read one by one on access.
POPULATE_READ = 22

_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _nothing() -> None:
    """The `prefetch` and `release` of data that is freed with its last reference."""


@dataclass(frozen=True, slots=True)
class TensorData:
    """The data of one tensor. Any thread may read it."""

    size_bytes: int
    read: Callable[[], Tensor]  # into memory; the result must not be written to
    prefetch: Callable[[], None] = _nothing  # starts reading ahead; returns before it is done
    release: Callable[[], None] = _nothing  # memory that the result of `read` does not own


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: its type and location.

    Attributes:
        shape: As the model needs it.
        dtype: Of the decoded elements.
        decode: Decodes bytes, (…,)  ->  `shape`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: TensorData
    decode: Callable[[Tensor], Tensor]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def mapped_data(view: Tensor) -> TensorData:
    """A part of a mapped file that is never written to. Its memory is the page cache."""

    def read() -> Tensor:
        _advise(view, POPULATE_READ)
        return view

    # Dropped pages are read again by a later access.
    prefetch, release = (
        partial(_advise, view, advice) for advice in (mmap.MADV_WILLNEED, mmap.MADV_DONTNEED)
    )
    return TensorData(view.nbytes, read, prefetch, release)


def copied_data(file: Path, start: int, size_bytes: int) -> TensorData:
    """A part of a file, read into memory of its own."""

    def prefetch() -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError), file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), start, size_bytes, os.POSIX_FADV_WILLNEED)

    def read() -> Tensor:
        copy = torch.empty(size_bytes, dtype=torch.uint8)
        rest, at = copy.numpy().data, start
        try:
            with file.open("rb", buffering=0) as stream:
                while rest:
                    count = os.preadv(stream.fileno(), [rest], at)
                    if count == 0:
                        raise ModelLoadError(f"{file}: cut short while it was read, at {at}")
                    rest, at = rest[count:], at + count
        except OSError as error:
            raise ModelLoadError(f"{file}: {error.strerror}") from error
        return copy

    return TensorData(size_bytes, read, prefetch)


Part = Callable[[int, int], TensorData]
"""Returns a part of a file by its first byte and its size in bytes."""


def open_file(file: Path, *, mapped: bool) -> Part:
    """Open a file and return a function that gives its parts, mapped or copied."""
    if not mapped:
        return partial(copied_data, file)
    try:
        with file.open("rb") as stream:
            # Copy-on-write, since torch has no read-only tensors; nothing is written.
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    whole = torch.frombuffer(content, dtype=torch.uint8)
    return lambda start, size: mapped_data(whole[start : start + size])


def numbers(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """View bytes (N,) as elements of a shape; copied if the file does not align them."""
    aligned = data if data.data_ptr() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(shape)


def _advise(mapped: Tensor, advice: int) -> None:
    """Hint at a tensor's pages, on Linux; other threads run meanwhile.

    By address and not by `mmap.madvise`, which holds the interpreter lock while a disk is read, and
    which does not know mappings that torch made.
    """
    if sys.platform != "linux" or mapped.nbytes == 0:
        return
    # Whole pages; a dropped page that a neighbour shares is read again on access.
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(mapped.data_ptr() + mapped.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    _LIBC.madvise(start, end - start, advice)


def trim() -> None:
    """Return freed memory to the system, where the C library can."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
