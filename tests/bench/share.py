"""Where the time of a decode step goes: kernels, Python, sending, or the bus thread.

CPU time of the worker's two threads as Linux counts it, from the worker's Prometheus metrics; no
profiler is attached. Expected for a step of the 135M shape: beside 9 ms of kernels with one client,
0.2 ms of Python in the batching thread and 0.1 ms for sending, each some dozens of calls whose code
the weights have evicted from the CPU caches; about as much with 16 clients, plus the work per row;
and 4 ms/s of upkeep in the bus thread.

    python -m tests.bench.share
    python -m tests.bench.share --rounds 1
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import msgspec
from tests.bench.models import CACHE, LLAMA_135M, QWEN_05B, Model, Shape, made
from tests.bench.peers.servers import Antiphon
from tests.bench.services import metrics_urls, scrape
from tests.bench.serving.client import HttpTarget
from tests.bench.serving.load import ClosedLoop, RandomLengths, Vocabulary, play
from tests.bench.summary import Measurement, arguments, here, measured, report
from tests.system.stack import Stack, serving

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


ROUNDS = 5
PROMPT_TOKENS = 16
SETTLE_S = 0.5
WINDOW_S = 5.0
"""Long beside a step, whose kernels count when they end, and beside scraping, which costs the bus
thread some milliseconds."""
PARTS = ("kernels", "python", "sending", "bus")
WORKER = "worker-0"
ARGUMENT = "--disable-overlap-schedule"
"""Beside kernels, Python would count less and take longer."""


class Case(msgspec.Struct, frozen=True):
    """A load on one server; the outputs are longer than a window."""

    shape: Shape
    clients: int
    output_tokens: int


CASES = (
    Case(LLAMA_135M, 1, 1500),
    Case(LLAMA_135M, 16, 750),
    Case(QWEN_05B, 1, 500),
    Case(QWEN_05B, 16, 300),
)


class Window(msgspec.Struct, frozen=True):
    """A window in which every client decodes, and the processor time of each part."""

    seconds: float
    steps: int
    parts_s: dict[str, float]

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / self.steps

    def part_ms(self, *parts: str) -> float:
        return 1000 * sum(self.parts_s[part] for part in parts) / self.steps

    @property
    def share(self) -> float:
        """Of a step: Python of both threads."""
        return self.part_ms("python", "sending", "bus") / self.step_ms


def main() -> None:
    given = arguments(description=__doc__, rounds=ROUNDS, file="share.json").parse_args()
    cases = {f"{case.shape.name}, {case.clients}": _measure(case, given.rounds) for case in CASES}
    rows = [row for case, windows in cases.items() for row in _rows(case, windows)]
    report(here("share", {"windows": given.rounds}, rows), given.json, cases)


def _rows(case: str, windows: Sequence[Window]) -> Iterable[Measurement]:
    yield measured("step_ms", (window.step_ms for window in windows), case=case)
    for part in PARTS:
        yield measured("cpu_ms", (window.part_ms(part) for window in windows), case=case, arm=part)
    yield measured("share", (window.share for window in windows), case=case)


def _measure(case: Case, rounds: int) -> list[Window]:
    model = made(case.shape)
    server = Antiphon(CACHE, os.cpu_count() or 1, (ARGUMENT,))
    with serving(*server.arguments(model)) as stack:
        return asyncio.run(_windows(case, model, stack, rounds))


async def _windows(case: Case, model: Model, stack: Stack, rounds: int) -> list[Window]:
    worker = (await metrics_urls(stack))[WORKER]
    words, windows = Vocabulary(model.folder), list[Window]()
    async with HttpTarget(stack.url, model.name) as target:
        for seed in range(-1, rounds):  # the first one only warms up
            dataset = RandomLengths(PROMPT_TOKENS, case.output_tokens)
            scripts = dataset.scripts(words, case.clients, seed + 1)
            async with asyncio.TaskGroup() as group:
                load = group.create_task(play(scripts, ClosedLoop(case.clients), target))
                while target.answering < case.clients:
                    assert not load.done(), "the answers are too short to be measured"
                    await asyncio.sleep(0.01)
                await asyncio.sleep(SETTLE_S)
                began, before = time.perf_counter(), await asyncio.to_thread(scrape, worker)
                await asyncio.sleep(WINDOW_S)
                after = await asyncio.to_thread(scrape, worker)
                seconds = time.perf_counter() - began
                assert target.answering == case.clients, "a request has finished"
            if seed >= 0:
                windows.append(_window(seconds, before, after))
    return windows


def _window(seconds: float, before: Mapping[str, float], after: Mapping[str, float]) -> Window:
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    parts = {part: grown[f'antiphon_worker_cpu_seconds_total{{part="{part}"}}'] for part in PARTS}
    return Window(seconds, round(grown["antiphon_step_seconds_count"]), parts)


if __name__ == "__main__":
    main()
