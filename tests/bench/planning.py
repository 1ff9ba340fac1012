"""CPU time of planning a step with many running and many queued: `python -m tests.bench.planning`.

A worker with all slots in use, as in tests/bench/micro/bench_batching.py: a new request follows
each finished one. Expected: 3 us a row to choose and lay out, whatever is queued; the target is
2 ms a step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from tests.bench.figures import Figure, Machine, figure, machine
from tests.bench.micro.bench_batching import LOADS, FullWorker
from tests.bench.summary import RESULTS, Summary, of_figure, write_results

ROUNDS = 5
STEPS = 2_000
FILE = RESULTS / "planning.json"


class Planned(msgspec.Struct, frozen=True):
    """Steps of one load, in us of processor time.

    Attributes:
        plan_us: To choose the rows and to build the plan.
        step_us: To commit what it drew as well.
    """

    load: str
    plan_us: Figure
    step_us: Figure


class Report(msgspec.Struct, frozen=True):
    """All loads, each in so many worlds after the other."""

    machine: Machine
    rounds: int
    steps: int
    loads: list[Planned]


def measure(name: str, rounds: int, steps: int) -> Planned:
    """Let workers of this load run, and time each step."""
    plans: list[float] = []
    whole: list[float] = []
    for _ in range(rounds):
        worker = FullWorker(LOADS[name][0])
        worker.refill()
        for number in range(steps + steps // 10):
            worker.refill()
            began = time.thread_time_ns()
            worker.plan()
            planned_ns = time.thread_time_ns() - began
            outcome = worker.outcome()
            began = time.thread_time_ns()
            worker.commit(outcome)
            if number >= steps // 10:
                plans.append(planned_ns / 1e3)
                whole.append((planned_ns + time.thread_time_ns() - began) / 1e3)
    return Planned(name, figure(np.round(plans, 1).tolist()), figure(np.round(whole, 1).tolist()))


def summarize(report: Report) -> Summary:
    """Reduce a run to the rows of its page section."""
    return Summary(
        section="planning",
        machine=report.machine,
        setup={"rounds": report.rounds, "steps": report.steps},
        rows=tuple(
            row
            for planned in report.loads
            for row in (
                of_figure("plan_us", planned.plan_us, case=planned.load),
                of_figure("step_us", planned.step_us, case=planned.load),
            )
        ),
    )


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.planning", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, default=FILE)
    arguments = parser.parse_args()
    loads = [measure(name, arguments.rounds, STEPS) for name in LOADS]
    report = Report(machine(), arguments.rounds, STEPS, loads)
    table = Table("load", "plan, us", "step, us")
    for planned in loads:
        table.add_row(planned.load, *map(_format, (planned.plan_us, planned.step_us)))
    Console(width=120).print(table)
    write_results(arguments.json, report, summarize(report))


def _format(figure: Figure) -> str:
    """Format as `median (10th percentile-90th percentile)`."""
    return f"{figure.p50:.0f} ({figure.p10:.0f}-{figure.p90:.0f})"


if __name__ == "__main__":
    main()
