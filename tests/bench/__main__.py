"""`make bench`: added latency of the services, hop by hop. Writes JSON where `--json` says."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tests.bench.figures import Machine, machine
from tests.bench.latency import HOPS, Latency, measure
from tests.bench.services import echo_stack

from antiphon.testing.nats import NatsServer


class Report(msgspec.Struct, frozen=True):
    """One run of the benchmark: rounds of the same, since the machine is shared."""

    machine: Machine
    latency: list[Latency]


async def run(rounds: int) -> Report:
    """Measure on a broker and a stack of its own a round."""
    results: list[Latency] = []
    for _ in range(rounds):
        async with NatsServer() as nats:
            results.append(await asyncio.to_thread(_round, nats.url))
    return Report(machine(), results)


def _round(nats_url: str) -> Latency:
    with echo_stack(nats_url) as stack:
        return measure(stack)


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


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.rounds))
    Console(width=120).print(show(report))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    main()
