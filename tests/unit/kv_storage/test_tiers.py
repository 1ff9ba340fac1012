"""Pages leave memory for disk and come back checked; what is leased stays."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kv_storage.service import Leases
from antiphon.kv_storage.store import DiskTier, MemoryTier, Page, PageStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


def digest(n: int) -> bytes:
    return hashlib.sha256(str(n).encode()).digest()


def page(n: int, size: int = 10) -> Page:
    data = bytes([n]) * size
    return Page(digest(n), data, hashlib.sha256(data).digest())


@asynccontextmanager
async def store(memory: MemoryTier, disk: DiskTier | None) -> AsyncGenerator[PageStore]:
    with ThreadPoolExecutor(1) as thread:
        yield PageStore(memory, disk, thread)


async def test_the_prefix_ends_at_the_first_page_that_is_missing():
    async with store(MemoryTier(100), None) as pages:
        await pages.put(page(0))
        await pages.put(page(2))
        assert pages.prefix_length([digest(0), digest(1), digest(2)]) == 1


async def test_pages_of_an_earlier_life_are_found_again(tmp_path: Path):
    DiskTier(tmp_path, 1000).put(page(7))
    (tmp_path / "half.partial").write_bytes(b"x")
    (tmp_path / "stranger.txt").write_bytes(b"x")
    disk = DiskTier(tmp_path, 1000)
    assert digest(7) in disk
    assert sorted(p.name for p in tmp_path.iterdir()) == [digest(7).hex() + ".page", "stranger.txt"]


@pytest.mark.parametrize("damage", [b"", b"short", bytes(42)])
async def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, damage: bytes):
    disk = DiskTier(tmp_path, 1000)
    disk.put(page(1))
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    async with store(MemoryTier(100), disk) as pages:
        assert await pages.load(digest(1)) is None
        assert pages.prefix_length([digest(1)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert disk.bytes_held == 0


def test_disk_drops_its_least_recently_used_page(tmp_path: Path):
    disk = DiskTier(tmp_path, 2 * 42)
    disk.put(page(0))
    disk.put(page(1))
    assert disk.get(digest(0)) is not None
    disk.put(page(2))
    assert [digest(n) in disk for n in range(3)] == [True, False, True]
    assert not disk.put(page(3, size=1000))


def test_leased_pages_stay_and_a_full_memory_refuses():
    now = 1000
    memory = MemoryTier(20)
    leases = Leases(memory, lambda: now)
    memory.put(page(0))
    memory.put(page(1))
    lease = leases.grant(1.0)
    leases.add(lease, page(0))
    leases.add(lease, page(1))
    assert memory.put(page(2)) is None
    token = next(iter(lease.pages))
    assert leases.get(token) == page(0).data
    now += 1001
    leases.sweep()
    assert leases.get(token) is None
    assert not memory._pins
    assert memory.put(page(2)) is not None


def test_a_lease_released_twice_frees_once():
    memory = MemoryTier(20)
    leases = Leases(memory, lambda: 0)
    memory.put(page(0))
    one, other = leases.grant(1), leases.grant(1)
    leases.add(one, page(0))
    leases.add(other, page(0))
    leases.release(one.name)
    leases.release(one.name)
    assert len(memory._pins) == 1
    leases.release(other.name)
    assert not memory._pins


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30), st.booleans()), max_size=60))
def test_memory_counts_its_bytes_and_never_holds_too_many(actions: list[tuple[int, int, bool]]):
    memory, held, pinned = MemoryTier(60), dict[bytes, Page](), list[bytes]()
    for n, size, pin in actions:
        new = page(n, size)
        leaving = memory.put(new)
        if leaving is None:
            assert new.digest not in held
            continue
        held.setdefault(new.digest, new)
        for old in leaving:
            del held[old.digest]
        if pin:
            memory.pin(new.digest)
            pinned.append(new.digest)
        elif pinned:
            memory.unpin(pinned.pop())
        assert memory.bytes_held == sum(len(p.data) for p in held.values()) <= 60
        assert all(d in memory for d in pinned)
        assert len(memory._pages) == len(held)
