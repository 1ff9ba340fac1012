"""A serving benchmark as JSON: what was asked of what, where, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from tests.bench.figures import Machine
from tests.bench.serving.device import Device
from tests.bench.serving.metrics import Metrics, Slo
from tests.bench.serving.plot import Line, chart

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).resolve().parents[1] / "results"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server.

    Attributes:
        over: `http`, `chat` (HTTP with the chat template) or `nats`.
        slo: What goodput counts; None where nothing was promised, and in results that are older.
        others: Share of all cores that others used meanwhile; None where that is not known.
    """

    name: str
    dataset: str
    arrival: str
    over: str
    seed: int
    metrics: Metrics
    slo: Slo | None = None
    others: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one call.

    Attributes:
        config_digest: Of the server's command line; empty where somebody else started it.
        facts: What follows from the runs, by name.
    """

    machine: Machine
    device: Device
    model: str
    config_digest: str
    runs: tuple[Run, ...]
    facts: dict[str, float] = {}

    def run(self, name: str) -> Run:
        """Return the run of a name."""
        return next(run for run in self.runs if run.name == name)


def write(report: Report, file: Path) -> None:
    """Write it, readable."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def read(file: Path) -> Report:
    """Read it again."""
    return msgspec.json.decode(file.read_bytes(), type=Report)


def drawn(report: Report) -> str:
    """Draw throughput against what it costs the one who waits, as SVG."""
    runs = sorted(report.runs, key=lambda run: run.metrics.output_tokens_per_s)
    lines = [
        Line(name, [(run.metrics.output_tokens_per_s, value(run)) for run in runs])
        for name, value in (
            ("TTFT p50", lambda run: run.metrics.ttft_ms.p50),
            ("TTFT p99", lambda run: run.metrics.ttft_ms.p99),
            ("ITL p50", lambda run: run.metrics.itl_ms.p50),
            ("ITL p99", lambda run: run.metrics.itl_ms.p99),
        )
    ]
    title = f"{report.model}, {report.runs[0].dataset}, {report.machine.commit}"
    return chart(title, "output tok/s", "ms", lines)


def table(runs: Sequence[Run]) -> Table:
    """Lay out runs, a row each."""
    shown = Table(title="times in ms: p50 / p99")
    rates = ("out tok/s", "total tok/s", "req/s")
    for column in ("run", "requests", "failed", *rates, "TTFT", "TPOT", "ITL", "E2E"):
        shown.add_column(column, justify="left" if column == "run" else "right")
    shown.add_column("goodput", justify="right")
    shown.add_column("others", justify="right")
    for run in runs:
        metrics = run.metrics
        times = (metrics.ttft_ms, metrics.tpot_ms, metrics.itl_ms, metrics.e2e_ms)
        shown.add_row(
            run.name,
            str(metrics.requests),
            str(metrics.failed),
            f"{metrics.output_tokens_per_s:.1f}",
            "" if metrics.total_tokens_per_s is None else f"{metrics.total_tokens_per_s:.1f}",
            f"{metrics.requests_per_s:.2f}",
            *(f"{each.p50:.1f} / {each.p99:.1f}" for each in times),
            "" if metrics.goodput is None else f"{metrics.goodput:.2f}",
            "" if run.others is None else f"{run.others:.0%}",
        )
    return shown
