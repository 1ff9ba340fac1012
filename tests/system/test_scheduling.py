"""Who goes first where more is asked for than one worker runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.system.stack import Stack, serving, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

RUNNING_MAX = 4
HELD_MAX = RUNNING_MAX + 2
"""Choices that the worker is given: those that run, and the scheduler's look-ahead."""
LOWS = 12


@pytest.fixture(scope="module")
def crowded() -> Iterator[Stack]:
    flags = ("--batching-running-max", str(RUNNING_MAX), "--enable-priority-scheduling")
    with serving("--telemetry-log-format", "json", *flags) as stack:
        yield stack


class Crowd:
    """Clients of one stack, and the order in which they have their answers."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self.answered: list[str] = []
        self._stack = stack
        self._session = session
        self._bound = self._bindings()

    async def ask(self, name: str, tokens: int, **fields: int) -> None:
        body = {
            "model": self._stack.model,
            "prompt": f"Count from {name} on.",
            "max_tokens": tokens,
            "ignore_eos": True,
            **fields,
        }
        async with self._session.post(f"{self._stack.url}/v1/completions", json=body) as answer:
            said = await answer.json()
            assert answer.status == 200, said
        choices = fields.get("n", 1)
        assert len(said["choices"]) == choices
        assert said["usage"]["completion_tokens"] == choices * tokens
        self.answered.append(name)

    async def has_bound(self, count: int) -> None:
        """Wait until so many requests of this crowd have a worker."""
        await asyncio.to_thread(
            wait_until, lambda: self._bindings() - self._bound >= count, 30, f"{count} are bound"
        )

    def _bindings(self) -> int:
        return self._stack.log("scheduler-0").count('"request bound"')


async def test_a_late_high_priority_overtakes_all_that_wait_and_a_higher_one_all_that_run(
    crowded: Stack,
) -> None:
    async with aiohttp.ClientSession() as session:
        crowd = Crowd(crowded, session)
        async with asyncio.TaskGroup() as group:
            for number in range(LOWS):
                group.create_task(crowd.ask(f"low-{number}", 400))
            await crowd.has_bound(HELD_MAX)
            group.create_task(crowd.ask("higher", 4, priority=5))
            group.create_task(crowd.ask("highest", 4, priority=100))
    assert crowd.answered[0] == "highest"
    assert crowd.answered.index("higher") <= 1 + HELD_MAX
    assert len(crowd.answered) == LOWS + 2


async def test_a_hundred_choices_wait_for_no_idle_worker_and_keep_nobody_waiting_for_one(
    crowded: Stack,
) -> None:
    async with aiohttp.ClientSession() as session:
        crowd = Crowd(crowded, session)
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.ask("long", 1500))
            await crowd.has_bound(1)
            group.create_task(crowd.ask("hundred", 2, n=100))
            await crowd.has_bound(2)
            for number in range(5):
                group.create_task(crowd.ask(f"one-{number}", 2))
    assert crowd.answered[-1] == "long"


MAX_QUEUED = 1
HOT = {"max_tokens": 12, "temperature": 1.5}


@pytest.fixture
def narrow() -> Iterator[Stack]:
    flags = ("--max-running-requests", "1", "--max-queued-requests", str(MAX_QUEUED))
    with serving(*flags, "--random-seed", "7") as stack:
        yield stack


async def test_max_queued_requests_counts_exactly_and_random_seed_gives_each_request_its_own(
    narrow: Stack,
) -> None:
    async with aiohttp.ClientSession() as session:
        texts = [await completion(session, narrow, HOT) for _ in range(4)]
        assert len(set(texts)) == 4
        bodies = [{"max_tokens": 300, "ignore_eos": True}] * 10
        statuses = await asyncio.gather(*(status(session, narrow, body) for body in bodies))
    assert sorted(statuses) == [200] * (1 + MAX_QUEUED) + [503] * (9 - MAX_QUEUED)


async def completion(session: aiohttp.ClientSession, stack: Stack, body: dict[str, Any]) -> str:
    body = {"model": stack.model, "prompt": "Once upon a time"} | body
    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["text"]


async def status(session: aiohttp.ClientSession, stack: Stack, body: dict[str, Any]) -> int:
    body = {"model": stack.model, "prompt": "Once upon a time"} | body
    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status
