"""Hints about memory: read mapped pages in, drop them, return free memory to the system.

By address and not by `mmap.madvise`, which holds the interpreter lock while a disk is read, and
which does not know mappings that torch made.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which the `mmap` module does not define; older kernels refuse
it, and pages are then read one by one on access."""


def prefetch(mapped: Tensor) -> None:
    """Start reading a tensor's pages into the page cache, without waiting."""
    _advise(mapped, mmap.MADV_WILLNEED if sys.platform == "linux" else 0)


def populate(mapped: Tensor) -> None:
    """Read a tensor's pages that are not in memory. Other threads run meanwhile."""
    _advise(mapped, POPULATE_READ)


def drop(mapped: Tensor) -> None:
    """Drop a tensor's pages from memory; a later access reads them from the file again.

    Only for tensors in a mapped file that were never written to.
    """
    _advise(mapped, mmap.MADV_DONTNEED if sys.platform == "linux" else 0)


def trim() -> None:
    """Return freed memory to the system, where the C library can."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def _advise(mapped: Tensor, advice: int) -> None:
    size = mapped.nbytes
    if sys.platform != "linux" or size == 0:
        return
    # Whole pages; a dropped page that a neighbour shares is read again on access.
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(mapped.data_ptr() + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    _LIBC.madvise(start, end - start, advice)


_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
