"""A pool of child processes: results, refusals, deadlines, and children that end."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.wait import until

from antiphon.service import process_pool
from antiphon.service.process_pool import FairQueue, ProcessPool
from antiphon.wire.errors import DeadlineExceeded, Internal, Overloaded, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

CHILD = """
import os, sys
from antiphon.service.process_pool import serve

class Endless(bytes):
    def __len__(self):
        return 1 << 60

def wait(gate):
    os.close(os.open(gate, os.O_RDONLY))  # until it is opened to be written

def work(job):
    kind, _, gate = job.partition(b" ")
    if kind == b"exit":
        os._exit(3)
    if kind == b"lie":
        return Endless(b"x")
    if kind == b"wait":
        wait(gate)
    if kind == b"fork":
        if os.fork() == 0:
            wait(gate)
            os._exit(0)
        wait(gate)
    if job == b"large":
        try:
            bytearray(1 << 34)
        except MemoryError:
            return b"too large"
    print("a print of a library")
    return str(os.getpid()).encode() + b" " + job

START
serve(work, *sys.argv[-2:])
"""


class Gate:
    """Holds jobs of children, or their start, until it is opened; then everything passes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self.job = b"wait " + bytes(path)
        self.start = f"wait({str(path)!r})"
        self._open: int | None = None

    def open(self) -> None:
        self._open = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


@asynccontextmanager
async def pool(
    *, start: str = "", job_s: float = 20.0, jobs_max: int = 8, bytes_max: int = 2**30
) -> AsyncIterator[ProcessPool]:
    """A pool of one child, which runs the line `start` before it is ready."""
    command = ("-c", CHILD.replace("START", start))
    async with ProcessPool(command, job_s=job_s, jobs_max=jobs_max, bytes_max=bytes_max) as made:
        yield made


def begin(
    made: ProcessPool, job: bytes, *, timeout_s: float = 20, owner: str = ""
) -> asyncio.Task[bytearray]:
    return asyncio.get_running_loop().create_task(made.run(job, timeout_s=timeout_s, owner=owner))


async def test_pool_runs_many_jobs_in_one_child_and_replaces_one_that_ended() -> None:
    async with pool() as made:
        results = [await made.run(b"x" * size, timeout_s=20) for size in (0, 1, 5_000_000)]
        (pid,) = {int(result.partition(b" ")[0]) for result in results}
        assert pid != os.getpid()
        assert [len(result.partition(b" ")[2]) for result in results] == [0, 1, 5_000_000]
        assert await made.run(b"large", timeout_s=20) == b"too large", "its memory is bounded"
        with pytest.raises(Internal):
            await made.run(b"exit", timeout_s=20)
        with pytest.raises(Internal, match="a result beyond its memory"):
            await made.run(b"lie", timeout_s=20)
        assert (await made.run(b"again", timeout_s=20)).endswith(b" again")


async def test_pieces_of_a_job_arrive_as_one() -> None:
    """Large ones are sent without a copy, and come back as large."""
    pieces = (b"a" * 3_000_000, bytearray(b"b"), b"", b"c" * 1_500_000)
    async with pool() as made:
        result = await made.run(*pieces, timeout_s=20)
    assert result.partition(b" ")[2] == b"".join(pieces)


async def test_pool_kills_a_child_whose_job_takes_too_long(gate: Gate) -> None:
    async with pool(job_s=30) as made:
        pid = await _warm(made)
        job = begin(made, gate.job, timeout_s=100)
        await _turn_of_the_loop()
        _put_forward(40.0)
        await until(job.done)  # which looks often: the loop has to see that its clock jumped
        with pytest.raises(DeadlineExceeded, match="within 30 s"):
            await job
        assert not _lives(pid)
        assert (await made.run(b"next", timeout_s=20)).endswith(b" next")


async def test_pool_kills_a_child_whose_job_outlives_its_caller_for_long(gate: Gate) -> None:
    async with pool(job_s=30) as made:
        pid = await _warm(made)
        await _leave(made, gate.job)
        _put_forward(40.0)
        await until(lambda: not _lives(pid))
        assert (await made.run(b"next", timeout_s=20)).endswith(b" next")


@pytest.mark.parametrize("late", [False, True], ids=("cancelled", "late"))
async def test_pool_keeps_the_child_of_a_job_whose_caller_left(gate: Gate, *, late: bool) -> None:
    """The next job finds it warm, whichever tenant sends it."""
    async with pool() as made:
        pid = await _warm(made)
        if late:
            with pytest.raises(DeadlineExceeded):
                await made.run(gate.job, timeout_s=0.05, owner="a")
        else:
            await _leave(made, gate.job, owner="a")
        gate.open()
        assert await made.run(b"next", timeout_s=20, owner="b") == b"%d next" % pid


async def test_pool_keeps_a_child_whose_caller_left_while_it_started(gate: Gate) -> None:
    """What it has asked for is not done."""
    async with pool(start=gate.start) as made:
        await _leave(made, b"exit")
        (pid,) = made.pids
        gate.open()
        assert await made.run(b"next", timeout_s=20) == b"%d next" % pid


async def test_pool_gives_no_turn_to_a_tenant_that_leaves(gate: Gate) -> None:
    """Its job keeps the place to its end, and another tenant's is next."""
    async with pool() as made, asyncio.TaskGroup() as group:
        await _warm(made)
        await _leave(made, gate.job, owner="a")
        order: list[str] = []

        async def job(owner: str) -> None:
            await made.run(b"job", timeout_s=20, owner=owner)
            order.append(owner)

        tasks = [group.create_task(job(owner)) for owner in ("a", "a", "b")]
        await _turn_of_the_loop()
        assert not any(task.done() for task in tasks)
        gate.open()
    assert order == ["a", "b", "a"]


async def test_pool_counts_the_time_of_a_job_from_when_its_child_is_ready(gate: Gate) -> None:
    async with pool(start=gate.start, job_s=30) as made:
        job = begin(made, b"job", timeout_s=50)
        await until(lambda: made.pids != ())
        _put_forward(40.0)
        await _turn_of_the_loop()
        gate.open()
        assert (await job).endswith(b" job")


async def test_pool_that_is_closed_while_a_child_starts_leaves_no_process(gate: Gate) -> None:
    async with pool(start=gate.start) as made:
        job = begin(made, b"job")
        await until(lambda: made.pids != ())
        pids = made.pids
        await made.close()
        with pytest.raises(Unavailable):
            await job
        assert [_lives(pid) for pid in pids] == [False]


async def test_pool_closed_before_a_child_is_known_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids: list[int] = []
    go = asyncio.Event()
    create = asyncio.create_subprocess_exec

    async def noted(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        child = await create(*args, **options)
        pids.append(child.pid)
        await go.wait()
        return child

    monkeypatch.setattr(process_pool.asyncio, "create_subprocess_exec", noted)
    async with pool() as made:
        job = begin(made, b"job")
        await until(lambda: pids != [])
        closing = asyncio.get_running_loop().create_task(made.close())
        await _turn_of_the_loop()
        go.set()
        await closing
        with pytest.raises(Unavailable):
            await job
    assert [_lives(pid) for pid in pids] == [False]


async def test_pool_that_is_closed_ends_every_child_though_one_is_slow(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child whose own child holds its pipes has not ended as far as asyncio can see."""
    monkeypatch.setattr(process_pool, "_LEAVE_S", 0.2)
    command = ("-c", CHILD.replace("START", ""))
    async with ProcessPool(command, job_s=20, processes=3) as made:
        jobs = [b"fork " + bytes(gate.path), gate.job, gate.job]
        tasks = [begin(made, job) for job in jobs]
        await until(lambda: len(made.pids) == 3)
        pids = made.pids
        await made.close()
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable] * 3
        assert [_lives(pid) for pid in pids] == [False] * 3


async def test_pool_that_is_closed_refuses_jobs_and_starts_no_child(gate: Gate) -> None:
    async with pool() as made:
        jobs = [begin(made, gate.job) for _ in range(3)]
        await until(lambda: made.pids != ())
        await made.close()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable] * 3
        with pytest.raises(Unavailable):
            await made.run(b"job", timeout_s=5.0)
        assert made.pids == ()


async def test_pool_refuses_jobs_beyond_its_bound(gate: Gate) -> None:
    """The limit is one owner's: another one's job waits for its turn."""
    async with pool(jobs_max=2) as made:
        jobs = [begin(made, gate.job) for _ in range(2)]
        await _turn_of_the_loop()
        reason = "too many large requests are waiting; the limit is 2"
        with pytest.raises(Overloaded, match=reason) as refused:
            await made.run(b"third", timeout_s=20)
        assert refused.value.retry_after_s == 1.0
        jobs.append(begin(made, b"other", owner="other"))
        gate.open()
        assert len(await asyncio.gather(*jobs)) == 3


async def test_pool_refuses_jobs_beyond_its_bytes(gate: Gate) -> None:
    async with pool(bytes_max=1000) as made:
        jobs = [begin(made, gate.job)]
        await _turn_of_the_loop()
        with pytest.raises(Overloaded, match=r"would take \d{4} bytes; the limit is 1000"):
            await made.run(b"x" * 1000, timeout_s=20)
        jobs.append(begin(made, b"x" * 2000, owner="other"))  # the first is let in
        gate.open()
        assert len(await asyncio.gather(*jobs)) == 2


@pytest.mark.parametrize("by", ["owner", "kind"])
async def test_pool_takes_owners_in_turns(by: str, gate: Gate) -> None:
    """An owner with many jobs delays another's by one; and so does a kind another of its owner."""
    async with pool() as made, asyncio.TaskGroup() as group:
        order: list[str] = []

        async def job(owner: str, number: int) -> None:
            assert await made.run(gate.job, timeout_s=20, **{by: owner})
            order.append(f"{owner}{number}")

        for owner, count in (("a", 4), ("b", 2)):
            for number in range(count):
                group.create_task(job(owner, number))
        await until(lambda: made.pids != ())
        gate.open()
    assert order == ["a0", "a1", "b0", "a2", "b1", "a3"]


async def test_kinds_of_jobs_give_their_owner_no_more_turns() -> None:
    """A tenant with images of many sizes has as many turns as one with images of one size."""
    queue, order = FairQueue(1), list[str]()

    async def job(owner: str, kind: str, number: int) -> None:
        await queue.acquire(owner, kind)
        order.append(f"{owner}{kind}{number}")
        await _turn_of_the_loop()
        queue.release()

    async with asyncio.TaskGroup() as group:
        for kind, count in (("x", 3), ("y", 2), ("z", 1)):
            for number in range(count):
                group.create_task(job("a", kind, number))
        left = group.create_task(job("a", "w", 0))
        for number in range(2):
            group.create_task(job("b", "x", number))
        await asyncio.sleep(0)
        left.cancel()
    assert order == ["ax0", "ax1", "bx0", "ay0", "bx1", "az0", "ax2", "ay1"]
    await queue.acquire("c")
    queue.release()


async def test_pool_gives_the_turn_of_a_job_whose_caller_left_to_the_next(gate: Gate) -> None:
    async with pool() as made:
        jobs = [begin(made, gate.job) for _ in range(4)]
        await until(lambda: made.pids != ())
        jobs[1].cancel()
        jobs[2].cancel()
        gate.open()
        assert len(await asyncio.gather(jobs[0], jobs[3])) == 2
        assert (await made.run(b"after", timeout_s=20)).endswith(b" after")


async def test_pool_reports_a_child_that_ends_before_it_is_ready() -> None:
    async with pool(start="sys.exit(3)") as made:
        with pytest.raises(Internal, match="before it was ready"):
            await made.run(b"job", timeout_s=20)
        assert made.pids == ()


async def _warm(made: ProcessPool) -> int:
    """Have a child that is ready; gives its process id."""
    await made.run(b"warm", timeout_s=20)
    (pid,) = made.pids
    return pid


async def _leave(made: ProcessPool, job: bytes, owner: str = "") -> None:
    """Send a job, and leave when a child has begun with it, or with its start."""
    caller = begin(made, job, owner=owner)
    await _turn_of_the_loop()
    await until(lambda: made.pids != ())
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def _turn_of_the_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def _put_forward(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
