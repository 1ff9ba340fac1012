"""`make bench`: what the services add, in time and in processor; as JSON, too."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tests.bench import services_cpu
from tests.bench.figures import Machine, machine
from tests.bench.latency import HOPS, Latency, measure
from tests.bench.services import echo_stack
from tests.bench.services_cpu import ServicesCpu
from tests.bench.summary import (
    RESULTS,
    Measurement,
    Summary,
    measured,
    of_figure,
    write_results,
)
from tests.support.nats import NatsServer

FILE = RESULTS / "services.json"


class Report(msgspec.Struct, frozen=True):
    """One run of the benchmark: rounds of the same, since the machine is shared."""

    machine: Machine
    latency: list[Latency]
    services_cpu: list[ServicesCpu]


async def run(rounds: int) -> Report:
    """Measure on a broker and a stack of its own a round."""
    results: list[tuple[Latency, ServicesCpu]] = []
    for _ in range(rounds):
        async with NatsServer() as nats:
            results.append(await asyncio.to_thread(_round, nats.url))
    latency, cpu = zip(*results, strict=True)
    return Report(machine(), list(latency), list(cpu))


def _round(nats_url: str) -> tuple[Latency, ServicesCpu]:
    with echo_stack(nats_url) as stack:
        latency = measure(stack)
    with echo_stack(nats_url, services_cpu.WORKER) as stack:
        return latency, services_cpu.measure(stack)


def summarize(report: Report) -> Summary:
    """Reduce a run to rows: latency by hop and round, and what each service used of a core."""
    rows: list[Measurement] = []
    for number, latency in enumerate(report.latency):
        parts = {**latency.hops_ms, "first_byte_ms": latency.first_byte_ms}
        rows += [
            of_figure(name, figure, case=f"round {number + 1}") for name, figure in parts.items()
        ]
    cpu = report.services_cpu
    if cpu:
        rows.append(measured("tokens_per_s", (one.tokens_per_s for one in cpu), case="cpu"))
        rows += [
            measured("percent", (o.services_percent[name] for o in cpu), case="cpu", arm=name)
            for name in cpu[0].services_percent
        ]
        rows.append(measured("percent", (o.total_percent for o in cpu), case="cpu", arm="all"))
    return Summary(
        section="services",
        machine=report.machine,
        setup={"rounds": len(report.latency)},
        rows=tuple(rows),
    )


def show(report: Report) -> Table:
    """Lay out the rounds side by side."""
    table = Table(
        title="gateway in to first SSE byte out, ms, one request at a time: p50 (p10-p90)"
    )
    table.add_column("part")
    for n in range(len(report.latency)):
        table.add_column(f"round {n + 1}", justify="right")
    names = {**HOPS, "http_ms": "HTTP: in, and the first byte out"}
    for name, words in names.items():
        cells = [result.hops_ms[name] for result in report.latency]
        table.add_row(words, *(f"{c.p50:.2f} ({c.p10:.2f}-{c.p90:.2f})" for c in cells))
    whole = [result.first_byte_ms for result in report.latency]
    table.add_row("all", *(f"{c.p50:.2f} ({c.p10:.2f}-{c.p90:.2f})" for c in whole), style="bold")
    return table


def show_cpu(report: Report) -> Table:
    """Lay out what each service used of a core."""
    table = Table(title="percent of a core at 600 tokens/s to 16 clients, without the worker")
    table.add_column("service")
    for n in range(len(report.services_cpu)):
        table.add_column(f"round {n + 1}", justify="right")
    for name in report.services_cpu[0].services_percent:
        shares = [result.services_percent[name] for result in report.services_cpu]
        table.add_row(name, *(f"{share:.1f}" for share in shares))
    totals = [result.total_percent for result in report.services_cpu]
    table.add_row("all", *(f"{total:.1f}" for total in totals), style="bold")
    return table


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=FILE)
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.rounds))
    Console(width=120).print(show(report), show_cpu(report))
    write_results(arguments.json, report, summarize(report))


if __name__ == "__main__":
    main()
