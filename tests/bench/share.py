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

import argparse
import asyncio
import os
import time
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table
from tests.bench.figures import Machine, machine
from tests.bench.models import CACHE, LLAMA_135M, QWEN_05B, Shape, made
from tests.bench.peers.antiphon import Antiphon
from tests.bench.serving.arrival import ClosedLoop
from tests.bench.serving.client import HttpTarget
from tests.bench.serving.datasets import RandomLengths, Vocabulary
from tests.bench.serving.load import play
from tests.bench.summary import RESULTS, Measurement, Summary, measured, write_results
from tests.bench.told import health_ports, numbers
from tests.system.stack import Stack, serving

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.bench.models import Model

ROUNDS = 5
PROMPT_TOKENS = 16
SETTLE_S = 0.5
WINDOW_S = 5.0
"""Long beside a step, whose kernels count when they end, and beside our asking, which costs the bus
thread some milliseconds."""
FILE = RESULTS / "share.json"
PARTS = ("kernels", "python", "sending", "bus")
WORKER = "worker-0"


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
    """A window in which every client decodes.

    Attributes:
        parts_s: Processor time of each part.
    """

    seconds: float
    steps: int
    parts_s: dict[str, float]

    @property
    def step_ms(self) -> float:
        """Time of a step, and of what lies between two."""
        return 1000 * self.seconds / self.steps

    def part_ms(self, *parts: str) -> float:
        """Processor time of parts in a step."""
        return 1000 * sum(self.parts_s[part] for part in parts) / self.steps

    @property
    def share(self) -> float:
        """Of a step: Python of both threads."""
        return self.part_ms("python", "sending", "bus") / self.step_ms


class Shares(msgspec.Struct, frozen=True):
    """The windows of one case."""

    shape: str
    clients: int
    windows: tuple[Window, ...]


class Report(msgspec.Struct, frozen=True):
    """What a run found."""

    machine: Machine
    cases: tuple[Shares, ...]


def main() -> None:
    """Measure each case, print, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.share", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    cases = tuple(_case(case, rounds) for case in CASES)
    report = Report(machine(), cases)
    Console(width=120).print(table(cases))
    write_results(FILE, report, summarize(report))


def summarize(report: Report) -> Summary:
    """Reduce a run to the rows of its page section."""
    rows: list[Measurement] = []
    for one in report.cases:
        case = f"{one.shape}, {one.clients}"
        rows.append(measured("step_ms", (w.step_ms for w in one.windows), case=case))
        rows += [
            measured("cpu_ms", (w.part_ms(part) for w in one.windows), case=case, arm=part)
            for part in PARTS
        ]
        rows.append(measured("share", (w.share for w in one.windows), case=case))
    return Summary(
        section="share",
        machine=report.machine,
        setup={"windows": len(report.cases[0].windows)},
        rows=tuple(rows),
    )


def table(cases: Sequence[Shares]) -> Table:
    """Medians by case, and the least and greatest share."""
    shown = Table("model", "clients", "step ms", *(f"{part} ms" for part in PARTS), "share %")
    for case in cases:
        shares = [100 * window.share for window in case.windows]
        shown.add_row(
            case.shape,
            str(case.clients),
            f"{median(window.step_ms for window in case.windows):.1f}",
            *(f"{median(w.part_ms(part) for w in case.windows):.2f}" for part in PARTS),
            f"{median(shares):.1f} ({min(shares):.1f} to {max(shares):.1f})",
        )
    return shown


def _case(case: Case, rounds: int) -> Shares:
    model = made(case.shape)
    antiphon = Antiphon(CACHE, os.cpu_count() or 1)
    with serving(*antiphon.arguments(model)) as stack:
        windows = asyncio.run(_windows(case, model, stack, rounds))
    return Shares(case.shape.name, case.clients, windows)


async def _windows(case: Case, model: Model, stack: Stack, rounds: int) -> tuple[Window, ...]:
    worker = {WORKER: (await health_ports(stack))[WORKER]}
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
                began, before = time.perf_counter(), await asyncio.to_thread(numbers, worker)
                await asyncio.sleep(WINDOW_S)
                after = await asyncio.to_thread(numbers, worker)
                seconds = time.perf_counter() - began
                assert target.answering == case.clients, "a request has finished"
            if seed >= 0:
                windows.append(_window(seconds, before, after))
    return tuple(windows)


def _window(seconds: float, before: Mapping[str, float], after: Mapping[str, float]) -> Window:
    def grown(name: str) -> float:
        return after[name] - before[name]

    return Window(
        seconds=seconds,
        steps=round(grown("antiphon_step_seconds_count")),
        parts_s={
            part: grown(f'antiphon_worker_cpu_seconds_total{{part="{part}"}}') for part in PARTS
        },
    )


if __name__ == "__main__":
    main()
