"""Pages in files, which outlive the process."""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from antiphon.kv_storage.pages import Page, PageIndex
from antiphon.transfer.checksums import page_checksum
from antiphon.transfer.memory import ChunkPool, views_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import BufferedReader, FileIO

log = logging.getLogger(__name__)

SUFFIX: Final = ".page"
PARTIAL: Final = ".partial"
TAG: Final = b"AKP1"
_FACTS = struct.Struct("<4s32s?32sQ")
SEAL_BYTES: Final = 32
HEADER_BYTES: Final = SEAL_BYTES + _FACTS.size


class _Header(NamedTuple):
    parent: bytes | None
    checksum: bytes
    data_bytes: int

    def pack(self) -> bytes:
        parent = self.parent or b""
        return _FACTS.pack(TAG, parent, self.parent is not None, self.checksum, self.data_bytes)


class DiskTier:
    """Pages in a folder of its own: one file a page, named by its digest.

    A file is a seal, then what the header says (the predecessor, and checksum and size of the
    content), then the content. The seal covers the name of the file and the header, so that the
    index is read from headers alone, and no damage makes one page pass for another. A file appears
    whole, by a rename, and after its predecessor: at any moment the folder is what a new process
    can start from. What fails a check is dropped, with all that follows it in its chain.

    All calls block and must come from one thread.

    Raises:
        OSError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path, bytes_max: int, pool: ChunkPool | None = None) -> None:
        self._folder = folder
        self._pool = pool or ChunkPool()
        self.index = PageIndex(bytes_max)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._find_pages()

    def touch(self, chain: Sequence[bytes]) -> None:
        """Mark pages of a chain as most recently used; survives a restart."""
        self.index.touch(chain)
        for digest in reversed(chain):
            if digest in self.index:
                now = time.time_ns()  # the kernel's own is that of the last timer interrupt
                with contextlib.suppress(OSError):  # a missing file is detected when it is read
                    os.utime(self._path(digest), ns=(now, now))

    def put(self, page: Page) -> bool:
        """Write a page; False if its predecessor is not here, it does not fit, or writing fails."""
        if page.digest in self.index:
            return True
        if page.parent is not None and page.parent not in self.index:
            return False
        size = HEADER_BYTES + len(page.data)
        if not self._free(size + self.index.bytes_held - self.index.bytes_max, page):
            return False
        try:
            try:
                self._write(page)
            except OSError as error:
                # Others use the disk, too: then pages have less of it than was configured.
                if error.errno != errno.ENOSPC or not self._free(size, page):
                    raise
                self._write(page)
        except OSError as error:
            log.warning("page not written", extra={"reason": error.strerror})
            return False
        self.index.add(page.digest, page.parent, size)
        return True

    def get(self, digest: bytes) -> Page | None:
        """Read a page. One that cannot be read or fails a check is dropped: a miss."""
        if digest not in self.index:
            return None
        try:
            page = self._read(digest)
        except OSError as error:
            log.warning("page not read", extra={"reason": error.strerror})
            self._drop(digest)
            return None
        if page is None:
            log.warning("page corrupt on disk", extra={"digest": digest.hex()})
            self._drop(digest)
        return page

    def _read(self, digest: bytes) -> Page | None:
        """Read the file of a page into memory of the pool; None if it fails a check."""
        with self._path(digest).open("rb", buffering=0) as file:
            header = _header(file.read(HEADER_BYTES) or b"", digest)
            if header is None or not _has_size(file, header):
                return None
            data = self._pool.take(header.data_bytes)
            if any(file.readinto(view) < len(view) for view in data.views):
                return None
        if not hmac.compare_digest(page_checksum(data), header.checksum):
            return None
        return Page(digest, header.parent, data, header.checksum)

    def _free(self, size_bytes: int, page: Page) -> bool:
        """Evict pages of so many bytes, but for the predecessor of a page; False: they do not."""
        leaving = self.index.leaving(size_bytes, lambda digest: digest == page.parent)
        for digest in leaving or ():
            self._remove(digest)
        return leaving is not None

    def _write(self, page: Page) -> None:
        partial = self._path(page.digest).with_suffix(PARTIAL)
        facts = _Header(page.parent, page.checksum, len(page.data)).pack()
        try:
            with partial.open("wb") as file:
                file.write(_seal(page.digest, facts))
                file.write(facts)
                file.writelines(views_of(page.data))
            partial.rename(self._path(page.digest))
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _find_pages(self) -> None:
        """Index the files of an earlier incarnation by their headers, in the order of their use."""
        found: list[tuple[int, bytes, _Header]] = []
        for entry in os.scandir(self._folder):
            path = Path(entry.path)
            if entry.name.endswith(PARTIAL):
                path.unlink(missing_ok=True)
            elif (digest := _digest_of(entry.name)) is not None:
                if (header := _read_header(path, digest)) is None:
                    path.unlink(missing_ok=True)
                else:
                    found.append((entry.stat().st_mtime_ns, digest, header))
        for _, digest, header in sorted(found):
            self.index.add(digest, header.parent, HEADER_BYTES + header.data_bytes)
        for digest in [each for each in self.index if self._is_orphan(each)]:
            self._drop(digest)
        for digest in list(self.index):
            self.index.touch([digest])
        for digest in self.index.leaving(self.index.bytes_held - self.index.bytes_max) or ():
            self._remove(digest)

    def _is_orphan(self, digest: bytes) -> bool:
        parent = self.index.parent(digest)
        return parent is not None and parent not in self.index

    def _drop(self, digest: bytes) -> None:
        """Remove a page that is lost or corrupt, and all that follow it."""
        for each in reversed(self.index.descendants(digest)):
            self._remove(each)

    def _remove(self, digest: bytes) -> None:
        self.index.remove(digest)
        try:
            self._path(digest).unlink(missing_ok=True)
        except OSError as error:
            log.warning("page not removed", extra={"reason": error.strerror})

    def _path(self, digest: bytes) -> Path:
        return self._folder / (digest.hex() + SUFFIX)


def _seal(digest: bytes, facts: bytes) -> bytes:
    return page_checksum(digest + facts)


def _header(content: bytes, digest: bytes) -> _Header | None:
    """The header of the file of a page; None if it is damaged, or that of another page."""
    seal, facts = content[:SEAL_BYTES], content[SEAL_BYTES:HEADER_BYTES]
    if len(content) < HEADER_BYTES or not hmac.compare_digest(seal, _seal(digest, facts)):
        return None
    tag, parent, has_parent, checksum, data_bytes = _FACTS.unpack(facts)
    return _Header(parent if has_parent else None, checksum, data_bytes) if tag == TAG else None


def _read_header(path: Path, digest: bytes) -> _Header | None:
    try:
        with path.open("rb") as file:
            header = _header(file.read(HEADER_BYTES), digest)
            whole = header is not None and _has_size(file, header)
    except OSError as error:
        log.warning("page not read", extra={"reason": error.strerror})
        return None
    return header if whole else None


def _has_size(file: FileIO | BufferedReader, header: _Header) -> bool:
    return os.fstat(file.fileno()).st_size == HEADER_BYTES + header.data_bytes


def _digest_of(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    except ValueError:
        return None
