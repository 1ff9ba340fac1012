"""Load: scripts, sent in a closed loop or at the times of a Poisson process (open loop)."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.bench.serving.client import Target, Timeline
    from tests.bench.serving.datasets import Script


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, each of which asks again as soon as it is answered.

    It measures what a server can do. It cannot show overload: a slow server is asked less.
    """

    clients: int

    def __str__(self) -> str:
        return f"closed:{self.clients}"


@dataclass(frozen=True)
class Poisson:
    """Requests that know nothing of each other: exponential gaps of mean 1 / rate.

    Source: `bench_serving` of SGLang, `--request-rate`.
    """

    rate_per_s: float
    seed: int = 0

    def times_s(self) -> Iterator[float]:
        """Yield the times since the start at which requests come; the first comes at once."""
        gaps = random.Random(self.seed)
        return itertools.accumulate(
            (gaps.expovariate(self.rate_per_s) for _ in itertools.count()), initial=0.0
        )

    def __str__(self) -> str:
        return f"poisson:{self.rate_per_s:g}"


Arrival = ClosedLoop | Poisson


def parse_arrival(text: str, seed: int) -> Arrival:
    """Read `closed:16` or `poisson:2.5`.

    Raises:
        ValueError: It is neither.
    """
    kind, _, number = text.partition(":")
    if kind == "closed" and number.isdecimal() and int(number) > 0:
        return ClosedLoop(int(number))
    if kind == "poisson" and float(number) > 0:
        return Poisson(float(number), seed)
    raise ValueError(f"{text!r} is neither closed:CLIENTS nor poisson:REQUESTS_PER_S")


async def play(scripts: Sequence[Script], arrival: Arrival, target: Target) -> list[Timeline]:
    """Send every request; return the timelines in the order in which they ended.

    In the open loop a conversation arrives as a whole: its first turn when it is due, each later
    turn when the one before is answered.
    """
    seen: list[Timeline] = []
    if isinstance(arrival, ClosedLoop):
        await _play_closed(scripts, arrival, target, seen)
    else:
        await _play_open(scripts, arrival, target, seen)
    return seen


async def _play_closed(
    scripts: Sequence[Script], arrival: ClosedLoop, target: Target, seen: list[Timeline]
) -> None:
    left = iter(scripts)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(arrival.clients, len(scripts))):
            group.create_task(_client(left, target, seen))


async def _client(left: Iterator[Script], target: Target, seen: list[Timeline]) -> None:
    for script in left:  # the clients take turns at one iterator
        await _speak(script, target, time.perf_counter(), seen)


async def _play_open(
    scripts: Sequence[Script], arrival: Poisson, target: Target, seen: list[Timeline]
) -> None:
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for script, after_s in zip(scripts, arrival.times_s(), strict=False):
            due_s = began_s + after_s
            await asyncio.sleep(due_s - time.perf_counter())
            group.create_task(_speak(script, target, due_s, seen))


async def _speak(script: Script, target: Target, due_s: float, seen: list[Timeline]) -> None:
    said: list[str] = []
    for turn in script.turns:
        timeline = await target.ask([*said, turn], script.output_tokens, due_s)
        seen.append(timeline)
        if timeline.error is not None:
            return  # a conversation without an answer has no next turn
        said += [turn, timeline.text]
        due_s = timeline.ended_s
