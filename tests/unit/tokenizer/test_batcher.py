"""Texts that arrive together are encoded together, and each caller gets its own result."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from antiphon.tokenizer.encoding import Batcher

if TYPE_CHECKING:
    from collections.abc import Sequence


class Work:
    """Doubles numbers in a thread that can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started = threading.Event()
        self.go = threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(items))
        self.started.set()
        assert self.go.wait(5)
        return [ValueError("odd") if item % 2 else 2 * item for item in items]


async def test_what_arrives_meanwhile_is_one_batch_and_errors_are_ones_own():
    work = Work()
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher[int, int](work, executor, batch_max=2)
        async with asyncio.TaskGroup() as group:
            runner = group.create_task(batcher.run())
            first = group.create_task(batcher.submit(2))
            await asyncio.to_thread(work.started.wait, 5)
            rest = [group.create_task(_caught(batcher, item)) for item in (4, 5, 6)]
            await asyncio.sleep(0)
            work.go.set()
            assert await first == 4
            assert [await task for task in rest] == [8, "odd", 12]
            runner.cancel()
    assert work.batches == [[2], [4, 5], [6]]


async def test_a_caller_that_left_is_skipped():
    work = Work()
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher[int, int](work, executor, batch_max=8)
        async with asyncio.TaskGroup() as group:
            leaver = group.create_task(batcher.submit(2))
            await asyncio.sleep(0)
            leaver.cancel()
            stayer = group.create_task(batcher.submit(4))
            await asyncio.sleep(0)
            runner = group.create_task(batcher.run())
            work.go.set()
            assert await stayer == 8
            runner.cancel()
    assert work.batches == [[4]]


async def test_bug_is_raised_to_its_callers_and_the_next_batch_runs():
    def work(items: Sequence[int]) -> list[int | Exception]:
        return [1 // item for item in items]

    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher[int, int](work, executor, batch_max=8)
        async with asyncio.TaskGroup() as group:
            runner = group.create_task(batcher.run())
            with pytest.raises(ZeroDivisionError):
                await batcher.submit(0)
            assert await batcher.submit(1) == 1
            runner.cancel()


async def test_waiting_callers_are_cancelled_with_the_work():
    work = Work()
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher[int, int](work, executor, batch_max=8)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(batcher.submit(2))
            runner = group.create_task(batcher.run())
            await asyncio.to_thread(work.started.wait, 5)
            runner.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            work.go.set()


async def _caught(batcher: Batcher[int, int], item: int) -> int | str:
    try:
        return await batcher.submit(item)
    except ValueError as error:
        return str(error)
