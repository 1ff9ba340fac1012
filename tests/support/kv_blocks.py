"""KV cache events by their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.digests import split_digests
from antiphon.wire.kv_events import BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Iterable


def blocks_stored(parent: bytes, blocks: Iterable[bytes]) -> BlocksStored:
    return BlocksStored(parent=parent, digests=b"".join(blocks))


def blocks_removed(blocks: Iterable[bytes]) -> BlocksRemoved:
    return BlocksRemoved(digests=b"".join(blocks))


def blocks_of(event: BlocksStored | BlocksRemoved) -> list[bytes]:
    return list(split_digests(event.digests))
