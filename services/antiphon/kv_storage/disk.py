"""The disk tier: one file per page, named by its digest, with LRU eviction.

A file is the SHA-256 of the content, then the content; a file that fails the check is dropped. All
calls block and must come from one thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.kv_storage.memory import Page

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

log = logging.getLogger(__name__)

SUFFIX = ".page"
CHECKSUM_BYTES = 32


class DiskTier:
    """Pages in a folder of its own, up to a number of bytes.

    Raises:
        OSError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.bytes_held = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._find_pages()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, digests: Iterable[bytes]) -> None:
        """Mark pages as most recently used, the last one most; survives a restart."""
        for digest in digests:
            if digest in self._sizes:
                self._sizes.move_to_end(digest)
                with contextlib.suppress(OSError):  # a missing file is detected when it is read
                    os.utime(self._path(digest))

    def put(self, page: Page, protected: Container[bytes] = ()) -> bool:
        """Write a page; False if it does not fit beside `protected`, or writing fails."""
        if page.digest in self._sizes:
            self._sizes.move_to_end(page.digest)
            return True
        size = len(page.data) + CHECKSUM_BYTES
        if size > self._bytes_max:
            return False
        free, leaving = self._bytes_max - self.bytes_held, list[bytes]()
        for old in self._sizes:
            if free >= size:
                break
            if old not in protected:
                leaving.append(old)
                free += self._sizes[old]
        if free < size:
            return False
        for old in leaving:
            self._drop(old)
        partial = self._path(page.digest).with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                file.write(page.checksum)
                file.write(page.data)
            partial.rename(self._path(page.digest))
        except OSError as error:
            partial.unlink(missing_ok=True)
            log.warning("page not written", extra={"reason": error.strerror})
            return False
        self._sizes[page.digest] = size
        self.bytes_held += size
        return True

    def get(self, digest: bytes) -> Page | None:
        """Read a page. One that cannot be read or fails the check is dropped: a miss."""
        if digest not in self._sizes:
            return None
        try:
            content = self._path(digest).read_bytes()
        except OSError as error:
            log.warning("page not read", extra={"reason": error.strerror})
            self._drop(digest)
            return None
        checksum, data = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
        if hashlib.sha256(data).digest() != checksum:
            log.warning("page corrupt on disk", extra={"digest": digest.hex()})
            self._drop(digest)
            return None
        self._sizes.move_to_end(digest)
        return Page(digest, data, checksum)

    def _find_pages(self) -> None:
        """Index the files of an earlier incarnation, oldest first."""
        found: list[tuple[int, bytes, int]] = []
        for entry in os.scandir(self._folder):
            digest = _digest_of(entry.name)
            if digest is None:
                if entry.name.endswith(".partial"):
                    Path(entry.path).unlink(missing_ok=True)
                continue
            status = entry.stat()
            found.append((status.st_mtime_ns, digest, status.st_size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size
            self.bytes_held += size
        while self.bytes_held > self._bytes_max:
            self._drop(next(iter(self._sizes)))

    def _drop(self, digest: bytes) -> None:
        self.bytes_held -= self._sizes.pop(digest)
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: bytes) -> Path:
        return self._folder / (digest.hex() + SUFFIX)


def _digest_of(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    except ValueError:
        return None
