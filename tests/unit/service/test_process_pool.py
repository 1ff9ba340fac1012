"""A pool of child processes: results, refusals, deadlines, and children that end."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from antiphon.service.process_pool import ProcessPool
from antiphon.testing.wait import until
from antiphon.wire.errors import DeadlineExceeded, Internal, Overloaded, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHILD = """
import os, sys, time
from antiphon.service.process_pool import serve

def work(job):
    if job == b"exit":
        os._exit(3)
    if job.startswith(b"wait "):
        while not os.path.exists(job[5:]):
            time.sleep(0.01)
    if job == b"large":
        try:
            bytearray(1 << 34)
        except MemoryError:
            return b"too large"
    print("a print of a library")
    return str(os.getpid()).encode() + b" " + job

serve(work, *sys.argv[-2:])
"""


@asynccontextmanager
async def pool(waiting_max: int = 8) -> AsyncIterator[ProcessPool]:
    made = ProcessPool(("-c", CHILD), waiting_max=waiting_max)
    try:
        yield made
    finally:
        await made.close()


async def test_pool_returns_what_one_child_makes_of_many_jobs() -> None:
    async with pool() as made:
        results = [await made.run(b"x" * size, timeout_s=20) for size in (0, 1, 5_000_000)]
    pids = {result.partition(b" ")[0] for result in results}
    assert len(pids) == 1
    assert pids != {str(os.getpid()).encode()}
    assert [len(result.partition(b" ")[2]) for result in results] == [0, 1, 5_000_000]


async def test_pool_starts_another_child_after_one_has_ended() -> None:
    async with pool() as made:
        with pytest.raises(Internal):
            await made.run(b"exit", timeout_s=20)
        assert (await made.run(b"again", timeout_s=20)).endswith(b" again")


async def test_pool_kills_a_child_that_is_late(tmp_path: Path) -> None:
    async with pool() as made:
        await made.run(b"warm", timeout_s=20)
        (late,) = made.pids
        with pytest.raises(DeadlineExceeded):
            await made.run(b"wait " + bytes(tmp_path / "never"), timeout_s=0.05)
        assert (await made.run(b"next", timeout_s=20)).endswith(b" next")
        assert late not in made.pids


async def test_pool_kills_a_child_whose_caller_left(tmp_path: Path) -> None:
    async with pool() as made:
        await made.run(b"warm", timeout_s=20)
        (pid,) = made.pids
        caller = asyncio.get_running_loop().create_task(
            made.run(b"wait " + bytes(tmp_path / "never"), timeout_s=20)
        )
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await until(lambda: not _lives(pid))
        assert (await made.run(b"next", timeout_s=20)).endswith(b" next")


async def test_pool_refuses_jobs_beyond_its_bound(tmp_path: Path) -> None:
    async with pool(waiting_max=1) as made:
        free = tmp_path / "free"
        loop = asyncio.get_running_loop()
        jobs = [loop.create_task(made.run(b"wait " + bytes(free), timeout_s=20)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 large requests wait"):
            await made.run(b"third", timeout_s=20)
        free.touch()
        assert len(await asyncio.gather(*jobs)) == 2


async def test_pool_takes_owners_in_turns(tmp_path: Path) -> None:
    """An owner with many jobs delays another's by one."""
    async with pool() as made, asyncio.TaskGroup() as group:
        free = tmp_path / "free"
        order: list[str] = []

        async def job(owner: str, number: int) -> None:
            result = await made.run(b"wait " + bytes(free), timeout_s=20, owner=owner)
            assert result
            order.append(f"{owner}{number}")

        for number in range(4):
            group.create_task(job("a", number))
        for number in range(2):
            group.create_task(job("b", number))
        await until(lambda: made.pids != ())
        free.touch()
    assert order == ["a0", "a1", "b0", "a2", "b1", "a3"]


async def test_pool_gives_the_turn_of_a_job_whose_caller_left_to_the_next(tmp_path: Path) -> None:
    async with pool() as made:
        free = tmp_path / "free"
        loop = asyncio.get_running_loop()
        jobs = [loop.create_task(made.run(b"wait " + bytes(free), timeout_s=20)) for _ in range(4)]
        await until(lambda: made.pids != ())
        jobs[1].cancel()
        jobs[2].cancel()
        free.touch()
        assert len(await asyncio.gather(jobs[0], jobs[3])) == 2
        assert (await made.run(b"after", timeout_s=20)).endswith(b" after")


async def test_pool_bounds_the_memory_of_a_child() -> None:
    async with pool() as made:
        assert await made.run(b"large", timeout_s=20) == b"too large"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_pool_that_is_closed_starts_no_child() -> None:
    async with pool() as made:
        await made.close()
        with pytest.raises(Unavailable):
            await made.run(b"job", timeout_s=5.0)
        assert made.pids == ()
