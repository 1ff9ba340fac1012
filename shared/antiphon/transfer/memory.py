"""Memory for blobs that is used again.

Memory that a process touches for the first time costs two to four times as much as receiving bytes
into it: the kernel finds a page, clears it and maps it. So blobs lie in chunks that go back to a
pool with their last reference, and are taken from there.
"""

from __future__ import annotations

import mmap
from collections import deque
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES: Final = 64 * 1024
SLAB_BYTES: Final = 8 * 1024**2
"""Chunks are made so many bytes at a time."""
_ZEROS: Final = Path("/dev/zero")


class PooledBlob:
    """Bytes in pieces of pooled memory, which goes back to its pool with the last reference.

    Attributes:
        views: The pieces, in order; of no use once there is no reference to this.
    """

    __slots__ = ("_chunks", "_free", "size_bytes", "views")

    def __init__(
        self, size_bytes: int, chunks: Sequence[memoryview], free: deque[memoryview]
    ) -> None:
        self.size_bytes = size_bytes
        # What is left over is small, and the allocator of the process has warm memory for it.
        rest = size_bytes - CHUNK_BYTES * len(chunks)
        tail = (memoryview(bytearray(rest)),) if rest else ()
        self.views: tuple[memoryview, ...] = (*chunks, *tail)
        self._chunks, self._free = chunks, free

    def __len__(self) -> int:
        return self.size_bytes

    def __bytes__(self) -> bytes:
        return b"".join(self.views)

    def __del__(self) -> None:
        self._free.extend(self._chunks)


BlobData = bytes | bytearray | memoryview | PooledBlob


def views_of(data: BlobData) -> tuple[memoryview, ...]:
    """The bytes of a blob, in pieces that are not copied."""
    return data.views if isinstance(data, PooledBlob) else (memoryview(data),)


class ChunkPool:
    """Chunks of memory that were touched before. Any thread may take and drop blobs.

    `reserve_bytes` are made ahead by `fill`, once there was a blob of at least a chunk. Nothing is
    given back to the system: the pool has as much as its blobs once had at a time, and the reserve.
    """

    def __init__(self, reserve_bytes: int = 0) -> None:
        self._reserve_chunks = reserve_bytes // CHUNK_BYTES
        # Appending and popping are atomic; the chunk that was dropped last is the warmest.
        self._free = deque[memoryview]()
        self._lock = Lock()
        self.size_bytes = 0

    @property
    def free_bytes(self) -> int:
        return CHUNK_BYTES * len(self._free)

    @property
    def short(self) -> bool:
        """Whether `fill` would make chunks."""
        return self.size_bytes > 0 and len(self._free) < self._reserve_chunks

    def take(self, size_bytes: int) -> PooledBlob:
        """Memory for a blob, with whatever was in it before."""
        chunks: list[memoryview] = []
        for _ in range(size_bytes // CHUNK_BYTES):
            while True:
                try:
                    chunks.append(self._free.pop())
                    break
                except IndexError:
                    self._make_chunks()
        return PooledBlob(size_bytes, chunks, self._free)

    def fill(self) -> None:
        """Make chunks until the reserve is there; blocks, and lets other threads run."""
        while self.short:
            self._make_chunks()

    def _make_chunks(self) -> None:
        slab = memoryview(mmap.mmap(-1, SLAB_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        with _ZEROS.open("rb", buffering=0) as zeros:
            zeros.readinto(slab)  # touches each page in one call, without the interpreter's lock
        with self._lock:
            self.size_bytes += SLAB_BYTES
        self._free.extendleft(
            slab[start : start + CHUNK_BYTES] for start in range(0, SLAB_BYTES, CHUNK_BYTES)
        )
