"""Hints about memory: bring these mapped pages in, drop those, give back what is free.

By address and not by `mmap.madvise`, which holds the interpreter while a disk is read, and which
does not know mappings that torch made.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which the `mmap` module does not name; older ones refuse it,
and pages come one by one as they are read."""


def prefetch(mapped: Tensor) -> None:
    """Have the disk read a tensor's pages into the kernel's cache of files, and do not wait."""
    _advise(mapped, mmap.MADV_WILLNEED if sys.platform == "linux" else 0)


def populate(mapped: Tensor) -> None:
    """Read a tensor's pages, if they are not in memory. Lets other threads run meanwhile."""
    _advise(mapped, POPULATE_READ)


def drop(mapped: Tensor) -> None:
    """Let a tensor's pages go; whoever reads them again has them from the file again.

    Only for tensors in a mapped file that were never written to.
    """
    _advise(mapped, mmap.MADV_DONTNEED if sys.platform == "linux" else 0)


def trim() -> None:
    """Give back the memory that is free but still held, where the C library can."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def _advise(mapped: Tensor, advice: int) -> None:
    size = mapped.nbytes
    if sys.platform != "linux" or size == 0:
        return
    # Whole pages; what a first or last one shares with a neighbour comes back when it is read.
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(mapped.data_ptr() + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    _LIBC.madvise(start, end - start, advice)


_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
