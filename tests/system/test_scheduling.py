"""Who goes first where more is asked for than one worker runs."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from tests.system.stack import Stack, module_stack, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

RUNNING_MAX = 4
HELD_MAX = RUNNING_MAX + 2
"""Choices that the worker is given: those that run, and the scheduler's look-ahead."""
LOWS = 12


crowded = module_stack(
    *("--batching-running-max", str(RUNNING_MAX), "--enable-priority-scheduling"),
    *("--telemetry-log-format", "json"),
)


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
