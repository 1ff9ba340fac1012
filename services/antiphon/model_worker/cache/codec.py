"""The page codec: blocks of 64 tokens as bytes, of every cache group, for use outside the process.

A record has, after a tag and its name, a word for each group: a bit for each page of the block that
is in it. The pages follow, group by group. A page of full attention or latents is always there; one
of a window only if it was still kept, and a state only at a checkpoint. What the bytes of a page
mean is part of its namespace (`wire.namespaces`), and therefore of the name of the record. The name
is in the record so that its checksum covers it: a store that answers with another block, or one of
another namespace, is found out by the reader.
"""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING, Final, Protocol

from antiphon.model_worker.cache.groups import HOLE, CacheGroup, GroupKind
from antiphon.transfer.checksums import page_checksum
from antiphon.wire.digests import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

BlockPages = tuple[tuple[int, ...], ...]
"""By group, the pages of a block; a hole where there is none, or where none is wanted."""

TAG: Final = b"AKB2"
NAME_BYTES: Final = 32


class RecordInvalid(Exception):
    """A record has another checksum than its claim, or another name, or not these groups' pages."""


class PageMemory(Protocol):
    """The memory of one group: copies pages to bytes, and back, but for those that are holes."""

    def read(self, pages: Sequence[int], out: memoryview) -> None: ...

    def write(self, pages: Sequence[int], data: memoryview) -> None: ...


class PageCodec:
    """Copies blocks to records, and back. Called in threads; has no state beside the pages.

    The caller sees to it that no page is written while it is read, nor used while it is written.
    """

    def __init__(self, groups: Sequence[CacheGroup], memories: Sequence[PageMemory]) -> None:
        assert len(groups) == len(memories), "each group has its memory"
        self.groups = tuple(groups)
        self._memories = tuple(memories)
        self._header = struct.Struct(f"<{len(TAG)}s{NAME_BYTES}s{len(groups)}Q")
        self.block_pages = BLOCK_TOKENS // groups[0].page_tokens

    @property
    def record_bytes_max(self) -> int:
        most = sum(
            group.page_bytes * (1 if group.kind is GroupKind.STATE else self.block_pages)
            for group in self.groups
        )
        return self._header.size + most

    def encode(
        self, name: bytes, block: BlockPages, memory: memoryview | None = None
    ) -> memoryview:
        """Copy a block to a record of this name, in the first bytes of `memory` if it is given."""
        present = [[page for page in pages if page != HOLE] for pages in block]
        sizes = [
            len(pages) * group.page_bytes for pages, group in zip(present, self.groups, strict=True)
        ]
        size_bytes = self._header.size + sum(sizes)
        record = (memoryview(bytearray(size_bytes)) if memory is None else memory)[:size_bytes]
        self._header.pack_into(record, 0, TAG, name, *map(_mask, block))
        start = self._header.size
        for source, pages, size in zip(self._memories, present, sizes, strict=True):
            source.read(pages, record[start : start + size])
            start += size
        return record

    def check(self, name: bytes, record: memoryview, checksum: bytes) -> tuple[int, ...]:
        """Verify a record; return by group which pages it has, as bits.

        Raises:
            RecordInvalid: It is not what was written under this name.
        """
        if not hmac.compare_digest(page_checksum(record), checksum):
            raise RecordInvalid("another checksum than that of its claim")
        if len(record) < self._header.size or bytes(record[: len(TAG)]) != TAG:
            raise RecordInvalid("no record of a block")
        _, named, *masks = self._header.unpack_from(record)
        if named != name:
            raise RecordInvalid("the record of another block")
        sizes = [
            mask.bit_count() * group.page_bytes
            for mask, group in zip(masks, self.groups, strict=True)
        ]
        if len(record) != self._header.size + sum(sizes):
            raise RecordInvalid("another size than that of its pages")
        return tuple(masks)

    def decode(
        self, record: memoryview, masks: Sequence[int], block: BlockPages, *, states: bool
    ) -> None:
        """Copy the pages of a checked record into those of a block; states, or all else.

        Pages of the record for which the block has a hole are left out.
        """
        start = self._header.size
        for group, memory, mask, pages in zip(
            self.groups, self._memories, masks, block, strict=True
        ):
            end = start + mask.bit_count() * group.page_bytes
            if (group.kind is GroupKind.STATE) is states and mask:
                present = [page for place, page in enumerate(pages) if mask >> place & 1]
                memory.write(present, record[start:end])
            start = end


class UsableBlocks:
    """How many of the blocks that have arrived, in order, a request can continue from.

    Every page of full attention is needed, those of a window as far as a query at the end attends
    to them, and a state at the end. Blocks begin with number `first` of their chain; what comes
    before it is in the prefix cache.
    """

    def __init__(self, groups: Sequence[CacheGroup], first: int) -> None:
        self._groups = groups
        self._first = first
        self._masks: list[tuple[int, ...]] = []
        self.count = 0

    def add(self, masks: tuple[int, ...], wanted: BlockPages) -> bool:
        """Add the next block; whether a request can continue from its end.

        `wanted` has the places of its pages: where one is missing, the prefix cache has the page.
        """
        self._masks.append(
            tuple(
                mask | ~_mask(pages) if group.kind is not GroupKind.STATE else mask
                for group, mask, pages in zip(self._groups, masks, wanted, strict=True)
            )
        )
        end = self._first + len(self._masks)
        if not all(self._whole(index, end) for index in range(len(self._groups))):
            return False
        self.count = len(self._masks)
        return True

    def _whole(self, index: int, end: int) -> bool:
        group = self._groups[index]
        block_pages = BLOCK_TOKENS // group.page_tokens
        if group.kind is GroupKind.STATE:
            return bool(self._masks[-1][index] >> (block_pages - 1) & 1)
        seen = max(group.dead_len(end * BLOCK_TOKENS), self._first * block_pages)
        return all(
            self._masks[page // block_pages - self._first][index] >> (page % block_pages) & 1
            for page in range(seen, end * block_pages)
        )


def _mask(pages: Sequence[int]) -> int:
    return sum(1 << place for place, page in enumerate(pages) if page != HOLE)
