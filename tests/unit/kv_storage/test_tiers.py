"""Tiers keep whole chains, from their beginning; what is lost or damaged is a miss, never wrong."""

from __future__ import annotations

import errno
import random
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clock import ManualClock

from antiphon.kv_storage.disk import HEADER_BYTES, DiskTier
from antiphon.kv_storage.pages import Page
from antiphon.kv_storage.service import Leases
from antiphon.kv_storage.store import MemoryTier, PageStore
from antiphon.transfer.checksums import page_checksum

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

FILE_BYTES = HEADER_BYTES + 10


def digest(n: int) -> bytes:
    return page_checksum(str(n).encode())


def page(n: int, size: int = 10, parent: int | None = None) -> Page:
    data = bytes([n]) * size
    return Page(digest(n), None if parent is None else digest(parent), data, page_checksum(data))


def content(page: Page) -> tuple[bytes, bytes | None, bytes, bytes]:
    return page.digest, page.parent, page.checksum, bytes(page.data)


@asynccontextmanager
async def store(memory: MemoryTier, disk: DiskTier | None) -> AsyncGenerator[PageStore]:
    with ThreadPoolExecutor(1) as thread:
        yield PageStore(memory, disk, thread)


def chain(disk: DiskTier, *numbers: int) -> None:
    """Write pages, each the predecessor of the next one."""
    for before, n in zip((None, *numbers), numbers, strict=False):
        assert disk.put(page(n, parent=before))


def held(disk: DiskTier) -> set[bytes]:
    """The digests of all pages, each of which can be read and has its predecessors."""
    for each in disk.index:
        parent = disk.index.parent(each)
        assert parent is None or parent in disk.index
    return set(disk.index)


async def test_prefix_ends_at_the_first_page_that_is_missing():
    async with store(MemoryTier(100), None) as pages:
        assert await pages.put(page(0))
        assert await pages.put(page(2))
        assert not await pages.put(page(4, parent=3))
        assert pages.prefix_length([digest(0), digest(1), digest(2)]) == 1


def test_pages_of_an_earlier_life_are_found_again(tmp_path: Path):
    chain(DiskTier(tmp_path, 1000), 7, 8)
    (tmp_path / "half.partial").write_bytes(b"x")
    (tmp_path / "stranger.txt").write_bytes(b"x")
    disk = DiskTier(tmp_path, 1000)
    assert held(disk) == {digest(7), digest(8)}
    assert disk.index.bytes_held == 2 * FILE_BYTES
    names = {digest(n).hex() + ".page" for n in (7, 8)}
    assert {p.name for p in tmp_path.iterdir()} == {*names, "stranger.txt"}


def test_restart_forgets_pages_whose_predecessor_is_lost_and_keeps_the_order_of_use(tmp_path: Path):
    disk = DiskTier(tmp_path, 1000)
    chain(disk, 0, 1, 2, 3)
    chain(disk, 10, 11)
    chain(disk, 20)
    disk.touch([digest(20)])
    disk.touch([digest(0), digest(1)])
    disk.touch([digest(10), digest(11)])
    (tmp_path / f"{digest(2).hex()}.page").unlink()
    again = DiskTier(tmp_path, 4 * FILE_BYTES)
    assert held(again) == {digest(0), digest(1), digest(10), digest(11)}
    chain(again, 30)
    assert held(again) == {digest(0), digest(10), digest(11), digest(30)}, "the leaf used first"


@pytest.mark.parametrize("damage", [b"", b"short", bytes(FILE_BYTES), bytes(5000)])
@pytest.mark.parametrize("restarted", [False, True])
async def test_damaged_file_is_a_miss_and_goes(tmp_path: Path, damage: bytes, restarted: bool):
    disk = DiskTier(tmp_path, 1000)
    disk.put(page(1))
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    if restarted:
        disk = DiskTier(tmp_path, 1000)
    async with store(MemoryTier(100), disk) as pages:
        assert await pages.load(digest(1)) is None
        assert pages.prefix_length([digest(1)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert disk.index.bytes_held == 0


@pytest.mark.parametrize("restarted", [False, True])
def test_no_flipped_bit_of_a_file_is_read_as_another_page(tmp_path: Path, restarted: bool):
    DiskTier(tmp_path, 1000).put(page(1))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for place in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(content)
        disk = DiskTier(tmp_path, 1000)
        file.write_bytes(flipped)
        if restarted:
            disk = DiskTier(tmp_path, 1000)
        assert disk.get(digest(1)) is None
        assert held(disk) == set()


def test_file_of_another_page_is_a_miss(tmp_path: Path):
    chain(DiskTier(tmp_path, 1000), 1, 2)
    one, other = (tmp_path / f"{digest(n).hex()}.page" for n in (1, 2))
    one.write_bytes(other.read_bytes())
    disk = DiskTier(tmp_path, 1000)
    assert disk.get(digest(1)) is None
    assert held(disk) == set()


def test_process_killed_at_any_byte_of_a_write_leaves_what_was_stored_before(tmp_path: Path):
    """Sweep all states of the folder between two writes: a file grows, is renamed, or one leaves.

    Files that end early under their final name are what a lost power supply leaves.
    """
    before, after = tmp_path / "before", tmp_path / "after"
    chain(DiskTier(before, 3 * FILE_BYTES), 0, 1, 2)
    shutil.copytree(before, after)
    assert DiskTier(after, 3 * FILE_BYTES).put(page(3, parent=1))
    content = (after / f"{digest(3).hex()}.page").read_bytes()
    stored = {digest(0), digest(1)}
    for size in range(len(content) + 1):
        for suffix in (".partial", ".page"):
            for evicted in (False, True):
                folder = tmp_path / f"{size}{suffix}{evicted}"
                shutil.copytree(before, folder)
                if evicted:
                    (folder / f"{digest(2).hex()}.page").unlink()
                (folder / f"{digest(3).hex()}{suffix}").write_bytes(content[:size])
                disk = DiskTier(folder, 10 * FILE_BYTES)
                whole = suffix == ".page" and size == len(content)
                expected = stored | ({digest(3)} if whole else set())
                assert held(disk) == expected | (set() if evicted else {digest(2)})
                for n in (0, 1, 2, 3):
                    found = disk.get(digest(n))
                    assert found is None or bytes(found.data) == page(n).data
                assert disk.put(page(3, parent=1)), "and it can be written again"
                shutil.rmtree(folder)


def test_disk_drops_its_least_recently_used_leaf(tmp_path: Path):
    disk = DiskTier(tmp_path, 4 * FILE_BYTES)
    chain(disk, 0, 1, 2)
    chain(disk, 3)
    disk.touch([digest(0), digest(1), digest(2)])
    chain(disk, 4)
    assert held(disk) == {digest(n) for n in (0, 1, 2, 4)}
    chain(disk, 5)
    assert held(disk) == {digest(n) for n in (0, 1, 4, 5)}, "the end of a chain leaves first"
    disk.touch([digest(4)])
    chain(disk, 6, 7)
    assert held(disk) == {digest(n) for n in (4, 5, 6, 7)}
    assert not disk.put(page(8, size=1000))
    assert not disk.put(page(9, parent=2)), "its predecessor has left"


class FullDisk(DiskTier):
    """A disk on which others have left so many bytes."""

    def __init__(self, folder: Path, bytes_max: int, bytes_left: int) -> None:
        self.bytes_left = bytes_left
        super().__init__(folder, bytes_max)

    def _write(self, page: Page) -> None:
        if self.index.bytes_held + HEADER_BYTES + len(page.data) > self.bytes_left:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(page)


def test_full_disk_makes_room_of_its_own_pages_or_stores_nothing(tmp_path: Path):
    disk = FullDisk(tmp_path, 100 * FILE_BYTES, 2 * FILE_BYTES)
    chain(disk, 0, 1)
    assert not disk.put(page(2, parent=1)), "its predecessors are not given up for it"
    assert held(disk) == {digest(0), digest(1)}
    chain(disk, 3)
    assert held(disk) == {digest(0), digest(3)}
    disk.bytes_left = 0
    assert not disk.put(page(4))
    assert not disk.put(page(5))
    assert all(name.name.endswith(".page") for name in tmp_path.iterdir())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the kernel refuse to write files beyond this size: Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_write_that_the_kernel_ends_early_leaves_nothing(tmp_path: Path):
    disk = DiskTier(tmp_path, 10**6)
    chain(disk, 0)
    for size in range(0, FILE_BYTES, 7):
        with largest_file(size):
            assert not disk.put(page(1, parent=0))
        assert held(disk) == {digest(0)}
        assert len(list(tmp_path.iterdir())) == 1
    chain(disk, 0, 1)


async def test_full_disk_is_a_page_that_is_not_stored(tmp_path: Path):
    disk = FullDisk(tmp_path, 10**6, 0)
    async with store(MemoryTier(1000), disk) as pages:
        assert not await pages.put(page(0))
        assert await pages.load(digest(0)) is None


def test_leased_pages_stay_and_a_full_memory_refuses():
    clock = ManualClock()
    memory = MemoryTier(20)
    leases = Leases(memory, clock)
    memory.put(page(0))
    memory.put(page(1))
    lease = leases.grant(1.0)
    leases.add(lease, page(0))
    leases.add(lease, page(1))
    assert not memory.put(page(2))
    token = next(iter(lease.pages))
    assert leases.get(token) == page(0).data
    clock.advance(1.001)
    leases.sweep()
    assert leases.get(token) is None
    assert not memory._pins
    assert memory.put(page(2))


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_step_of_the_wall_clock_neither_ends_leases_nor_keeps_them(step_s: float):
    clock, memory = ManualClock(), MemoryTier(20)
    leases = Leases(memory, clock)
    memory.put(page(0))
    leases.add(leases.grant(1.0), page(0))
    clock.step_wall(step_s)
    leases.sweep()
    assert memory._pins
    clock.advance(1.001)
    leases.sweep()
    assert not memory._pins


def test_lease_released_twice_frees_once():
    memory = MemoryTier(20)
    leases = Leases(memory, ManualClock())
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
    memory, pinned = MemoryTier(60), list[bytes]()
    for n, size, pin in actions:
        new, before = page(n, size), set(memory._pages)
        if not memory.put(new):
            assert set(memory._pages) == before
            assert new.digest not in before
            continue
        if pin:
            memory.pin(new.digest)
            pinned.append(new.digest)
        elif pinned:
            memory.unpin(pinned.pop())
        sizes = [len(each.data) for each in memory._pages.values()]
        assert memory.index.bytes_held == sum(sizes) <= 60
        assert all(memory.get(digest) is not None for digest in pinned)
        assert set(memory.index) == set(memory._pages)


@pytest.mark.parametrize("seed", range(100))
async def test_no_page_outlives_its_predecessor(seed: int, tmp_path: Path):
    """Puts, loads, touches, losses and restarts of a random forest, with and without a disk."""
    chance = random.Random(seed)
    parents = [None, *(chance.choice([None, *range(n)]) for n in range(1, 30))]
    disk = DiskTier(tmp_path, chance.randint(1, 20) * FILE_BYTES) if seed % 2 else None
    memory = MemoryTier(10 * chance.randint(1, 20), over_disk=disk is not None)
    async with store(memory, disk) as pages:
        for _ in range(200):
            n = chance.randrange(30)
            match chance.randrange(4):
                case 0 | 1:
                    await pages.put(page(n, parent=parents[n]))
                case 2:
                    found = await pages.load(digest(n))
                    assert found is None or content(found) == content(page(n, parent=parents[n]))
                case _:
                    path, each = list[bytes](), chance.choice([n, None])
                    while each is not None:
                        path.insert(0, digest(each))
                        each = parents[each]
                    await pages.touch(path)
            for each in range(30):
                parent = parents[each]
                if digest(each) in pages and parent is not None:
                    assert digest(parent) in pages
            if disk is not None and (files := list(tmp_path.iterdir())):
                if chance.random() < 0.05:
                    chance.choice(files).write_bytes(b"?")
                if chance.random() < 0.05:
                    disk.__init__(tmp_path, disk.index.bytes_max)
