"""Two real workers over a real broker: prompts go where their beginning is, if that lives."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.system.stack import START_TIMEOUT_S, STOP_TIMEOUT_S, Stack, module_stack, wait_until

from antiphon.wire.digests import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

KNOWN_S = 20.0
"""Until the leader knows what has happened, and its metrics say so."""
STORY = " ".join(f"Sentence {number} of a story." for number in range(40))
OTHER = " ".join(f"Line {number} of a quite different poem." for number in range(40))


stack = module_stack(
    *("--telemetry-log-format", "json", "--batching-running-max", "1"),
    *("--queue-hand-back-s", "60"),
)


@dataclass
class Pair:
    """A stack, and a worker beside the one that it has; `began` is where its log was then."""

    stack: Stack
    second: subprocess.Popen[bytes]
    began: int

    def bindings(self) -> list[dict[str, object]]:
        """What the scheduler has bound, in order."""
        return [line for line in self._events() if line["event"] == "request bound"]

    def given_back(self) -> list[dict[str, object]]:
        return [line for line in self._events() if line["event"] == "request requeued"]

    def _events(self) -> Iterator[dict[str, object]]:
        for line in self.stack.log("scheduler-0")[self.began :].splitlines():
            if line.endswith("}"):
                yield json.loads(line)

    def metric(self, name: str) -> float:
        """A gauge of the scheduler, with its labels; 0 without one."""
        lines = self.stack.get("/metrics").splitlines()
        found = [line for line in lines if line.startswith(f"antiphon_scheduler_{name} ")]
        return sum(float(line.split()[-1]) for line in found)

    async def places_both(self) -> None:
        """Wait until the leader can place requests on both workers."""
        await asyncio.to_thread(
            wait_until,
            lambda: all(self.metric(f'worker_capacity{{worker="worker-{n}"}}') for n in range(2)),
            KNOWN_S,
            "both workers have room",
        )

    async def ask(self, session: aiohttp.ClientSession, prompt: str, tokens: int = 4) -> int:
        """Ask for an answer of so many tokens, see that it is whole; return the prompt's blocks."""
        body = {
            "model": self.stack.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        async with session.post(f"{self.stack.url}/v1/completions", json=body) as answer:
            said = await answer.json()
            assert answer.status == 200, said
            assert said["usage"]["completion_tokens"] == tokens, said
            return said["usage"]["prompt_tokens"] // BLOCK_TOKENS

    async def place(self, session: aiohttp.ClientSession, prompt: str) -> tuple[str, int]:
        """Ask; return the worker that it went to, and the blocks that this was known to have."""
        known = len(self.bindings())
        await self.ask(session, prompt)
        (bound,) = self.bindings()[known:]
        return str(bound["worker"]), int(str(bound["cached_blocks"]))


@pytest.fixture
def pair(stack: Stack, tmp_path: Path) -> Iterator[Pair]:
    began = len(stack.log("scheduler-0"))
    command = [sys.executable, "-m", "antiphon.model_worker", "--instance", "worker-1"]
    log = tmp_path / "worker-1.log"
    with log.open("wb") as file:
        second = subprocess.Popen(
            [*command, "--config", str(stack.logs.parent / "settings.yaml")],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: '"ready"' in log.read_text(), START_TIMEOUT_S, "the second worker")
        yield Pair(stack, second, began)
    finally:
        second.kill()
        second.wait(STOP_TIMEOUT_S)


async def test_a_prompt_goes_to_the_worker_that_has_its_beginning_until_that_dies(
    pair: Pair,
) -> None:
    async with aiohttp.ClientSession() as session:
        await pair.places_both()
        before = pair.metric("known_blocks")
        # Together, so that each goes to a worker of its own.
        blocks = await asyncio.gather(pair.ask(session, STORY, 200), pair.ask(session, OTHER, 200))
        await asyncio.to_thread(
            wait_until,
            lambda: pair.metric("known_blocks") >= before + sum(blocks),
            KNOWN_S,
            "the blocks of both prompts are known",
        )
        first, second = pair.bindings()
        assert {first["worker"], second["worker"]} == {"worker-0", "worker-1"}
        story, cached = await pair.place(session, STORY + " And then?")
        assert cached > 3
        poem, cached = await pair.place(session, OTHER + " And then?")
        assert cached > 3
        assert {story, poem} == {"worker-0", "worker-1"}, "both went to one worker"
        again, _ = await pair.place(session, STORY + " And in the end?")
        assert again == story
        pair.second.kill()
        lost = STORY if story == "worker-1" else OTHER
        # Its death shows after five heartbeats; the request that it had until then begins anew.
        await pair.ask(session, lost + " Who lives?")
        assert pair.bindings()[-1]["worker"] == "worker-0"


async def test_what_a_leaving_worker_has_not_begun_is_answered_by_the_other(
    pair: Pair,
) -> None:
    async with aiohttp.ClientSession() as session:
        await pair.places_both()
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(pair.ask(session, f"Count from {number}.", 500))
            await asyncio.to_thread(
                wait_until, lambda: len(pair.bindings()) == 6, 10, "all have a worker"
            )
            pair.second.send_signal(signal.SIGTERM)
    returned = pair.given_back()
    assert returned, "nothing was given back"
    assert {line["worker"] for line in returned} == {"worker-1"}
    assert await asyncio.to_thread(pair.second.wait, STOP_TIMEOUT_S) == 0
