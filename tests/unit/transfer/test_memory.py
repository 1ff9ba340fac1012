"""Blobs in pooled memory: what was dropped is used again, and what travels is what was put."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from antiphon.service.startup import bind
from antiphon.transfer.blobs import PIECES_MAX, BlobServer, new_token
from antiphon.transfer.checksums import page_checksum
from antiphon.transfer.memory import CHUNK_BYTES, SLAB_BYTES, ChunkPool, PooledBlob
from antiphon.transfer.stream import receive_blobs
from antiphon.wire.claim import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5, (PIECES_MAX + 2) * CHUNK_BYTES)


def filled(pool: ChunkPool, data: bytes) -> PooledBlob:
    blob, start = pool.take(len(data)), 0
    for view in blob.views:
        view[:] = data[start : start + len(view)]
        start += len(view)
    return blob


def test_memory_of_dropped_blobs_is_used_again() -> None:
    pool = ChunkPool()
    for _ in range(20):
        held = [pool.take(CHUNK_BYTES * 10 + 7) for _ in range(3)]
        del held
    assert pool.size_bytes == pool.free_bytes == SLAB_BYTES


def test_blobs_that_are_held_share_no_memory() -> None:
    pool = ChunkPool()
    blobs = [filled(pool, bytes([n]) * (CHUNK_BYTES + n)) for n in range(200)]
    assert all(bytes(blob) == bytes([n]) * (CHUNK_BYTES + n) for n, blob in enumerate(blobs))
    assert all(page_checksum(blob) == page_checksum(bytes(blob)) for blob in blobs)
    assert pool.size_bytes == pool.free_bytes + 200 * CHUNK_BYTES


def test_reserve_is_made_once_blobs_have_chunks() -> None:
    pool = ChunkPool(3 * SLAB_BYTES)
    pool.fill()
    small = pool.take(CHUNK_BYTES - 1)
    assert (len(small.views), pool.size_bytes, pool.short) == (1, 0, False)
    large = pool.take(CHUNK_BYTES)
    assert pool.short
    pool.fill()
    assert not pool.short
    assert pool.free_bytes >= 3 * SLAB_BYTES
    del large


def test_threads_take_and_drop_blobs_at_once() -> None:
    pool = ChunkPool()

    def work(number: int) -> bool:
        chance = random.Random(number)
        for _ in range(100):
            data = bytes([number]) * chance.randrange(5 * CHUNK_BYTES)
            if bytes(filled(pool, data)) != data:
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))
    assert pool.size_bytes == pool.free_bytes


class Shelf:
    def __init__(self) -> None:
        self.blobs: dict[str, bytes | PooledBlob] = {}

    def get(self, token: str) -> bytes | PooledBlob | None:
        return self.blobs.get(token)


@pytest.mark.parametrize("pooled", [False, True], ids=["bytes", "pooled"])
async def test_received_blobs_are_those_that_were_put(pooled: bool) -> None:
    pool, target, shelf = ChunkPool(), ChunkPool(), Shelf()
    chance = random.Random(1)
    contents = [chance.randbytes(size) for size in SIZES]

    def received(claims: Sequence[Claim]) -> list[bytes]:
        return [bytes(blob) for blob in receive_blobs(claims, target, timeout_s=20)]

    with bind("127.0.0.1", 0) as bound:
        claims: list[Claim] = []
        for data in contents:
            token = new_token()
            shelf.blobs[token] = filled(pool, data) if pooled else data
            claims.append(
                Claim(
                    address=f"127.0.0.1:{bound.getsockname()[1]}",
                    token=token,
                    size_bytes=len(data),
                    digest=page_checksum(data),
                    expires_unix_ms=0,
                )
            )
        async with asyncio.TaskGroup() as group:
            server = group.create_task(BlobServer(bound, shelf).run())
            assert await asyncio.to_thread(received, claims) == contents
            server.cancel()
