"""What a tier holds: pages, which one comes before which, and the order in which they leave."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from antiphon.transfer.memory import BlobData


@dataclass(frozen=True, slots=True)
class Page:
    """One page: its bytes, their checksum as its writer has made it, and the page before it."""

    digest: bytes
    parent: bytes | None
    data: BlobData
    checksum: bytes


@dataclass(frozen=True, slots=True)
class _Held:
    parent: bytes | None
    size_bytes: int


class PageIndex:
    """The pages of a tier by digest, least recently used first, as a forest.

    Only leaves are chosen to leave: without its predecessors a page could never be found. A page
    whose predecessor is not here is a root.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._children: dict[bytes, set[bytes]] = {}  # of pages that are here, or will be

    def __contains__(self, digest: object) -> bool:
        return digest in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._held)

    def parent(self, digest: bytes) -> bytes | None:
        return self._held[digest].parent

    def add(self, digest: bytes, parent: bytes | None, size_bytes: int) -> None:
        """Add a page, which is not here, as the most recently used one."""
        self._held[digest] = _Held(parent, size_bytes)
        self.bytes_held += size_bytes
        if parent is not None:
            self._children.setdefault(parent, set()).add(digest)

    def remove(self, digest: bytes) -> None:
        held = self._held.pop(digest)
        self.bytes_held -= held.size_bytes
        if held.parent is not None:
            siblings = self._children[held.parent]
            siblings.remove(digest)
            if not siblings:
                del self._children[held.parent]

    def touch(self, chain: Sequence[bytes]) -> None:
        """Mark pages of a chain as used, with all before them: each after those that follow it."""
        for digest in reversed(chain):
            if digest in self._held:
                self._held.move_to_end(digest)
        before = self._held.get(chain[0]) if chain else None
        while before is not None and before.parent in self._held:
            self._held.move_to_end(before.parent)
            before = self._held[before.parent]

    def descendants(self, digest: bytes) -> list[bytes]:
        """A page and all that follow it, each after its predecessor."""
        found = [digest]
        for each in found:
            found.extend(self._children.get(each, ()))
        return found

    def leaving(
        self, size_bytes: int, stays: Callable[[bytes], bool] = lambda _: False
    ) -> list[bytes] | None:
        """The least recently used leaves, in order, that free so many bytes.

        None if all of them do not. A page for which `stays` is true does not leave.
        """
        leaving: dict[bytes, None] = {}
        found = True
        # What has been used lies behind what follows it, so that one turn finds all leaves.
        while size_bytes > 0 and found:
            found = False
            for digest, held in self._held.items():
                if size_bytes <= 0:
                    break
                leaf = self._children.get(digest, set()) <= leaving.keys()
                if leaf and digest not in leaving and not stays(digest):
                    leaving[digest] = None
                    size_bytes -= held.size_bytes
                    found = True
        return list(leaving) if size_bytes <= 0 else None
