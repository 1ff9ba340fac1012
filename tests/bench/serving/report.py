"""A serving benchmark: its raw results, and the summary made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from tests.bench.figures import Machine
from tests.bench.serving.device import Device
from tests.bench.serving.metrics import Metrics, Slo
from tests.bench.serving.plot import Line, chart
from tests.bench.summary import Measurement, Summary, measured, of_spread, single

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server.

    Attributes:
        over: `http`, `chat` (HTTP with the chat template) or `nats`.
        slo: The SLO of goodput; None without one, and in older results.
        others: Share of all cores that other processes used meanwhile; None if unknown.
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
    """All runs of one invocation.

    Attributes:
        config_digest: Of the server's command line; empty if it was not started here.
        facts: What follows from the runs, by name.
    """

    machine: Machine
    device: Device
    model: str
    config_digest: str
    runs: tuple[Run, ...]
    facts: dict[str, float] = {}


def read(file: Path) -> Report:
    """Read raw results."""
    return msgspec.json.decode(file.read_bytes(), type=Report)


def summarize(report: Report) -> Summary:
    """Reduce each run to its rows."""
    slo = report.runs[0].slo
    limits = [] if slo is None else slo.promises()
    setup = _setup(report) | {
        "slo": " and ".join(f"{name} <= {most:g} ms" for name, most in limits)
    }
    return Summary(
        section="serving",
        machine=report.machine,
        device=report.device,
        setup=setup,
        rows=tuple(
            row
            for case, run in zip(_cases(report.runs), report.runs, strict=True)
            for row in _rows(case, run)
        ),
    )


def summarize_facts(
    section: str, report: Report, by_round: Mapping[str, Sequence[float]]
) -> Summary:
    """Reduce runs in pairs to a row for each fact.

    Args:
        section: Of the page.
        report: Two runs a pair.
        by_round: The values behind facts, by their names, where they were recorded.
    """
    rows: list[Measurement] = []
    for name, value in report.facts.items():
        if name in by_round:
            rows.append(measured(name, by_round[name], case=report.model, by_round=True))
        elif not name.endswith(("_least", "_most")):
            rows.append(single(name, value, case=report.model))
    return Summary(
        section=section,
        machine=report.machine,
        device=report.device,
        setup=_setup(report) | {"pairs": len(report.runs) // 2},
        rows=tuple(rows),
    )


def _setup(report: Report) -> dict[str, str | int | float]:
    first = report.runs[0]
    return {
        "model": report.model,
        "dataset": first.dataset,
        "over": first.over,
        "config_digest": report.config_digest,
    }


def _cases(runs: Sequence[Run]) -> Iterable[str]:
    """Name each run by its arrival process, and by its seed where that is not enough."""
    names = [run.arrival for run in runs]
    for run in runs:
        alone = names.count(run.arrival) == 1
        yield run.arrival if alone else f"{run.arrival}, seed {run.seed}"


def _rows(case: str, run: Run) -> Iterable[Measurement]:
    metrics = run.metrics
    for name, value in (
        ("requests", metrics.requests),
        ("failed", metrics.failed),
        ("output_tokens_per_s", metrics.output_tokens_per_s),
        ("requests_per_s", metrics.requests_per_s),
        ("goodput", metrics.goodput),
        ("concurrency", metrics.concurrency),
        ("others", run.others),
    ):
        if value is not None:
            yield single(name, value, case=case)
    finished = metrics.requests - metrics.failed
    yield of_spread("ttft_ms", metrics.ttft_ms, case=case, n=finished)
    yield of_spread("tpot_ms", metrics.tpot_ms, case=case)
    yield of_spread("itl_ms", metrics.itl_ms, case=case)
    yield of_spread("e2e_ms", metrics.e2e_ms, case=case, n=finished)


def drawn(summary: Summary) -> str:
    """Draw latency against throughput as SVG."""

    def point(case: str, quantity: str, percentile: str) -> tuple[float, float]:
        row = summary.row(quantity, case=case)
        y = row.middle if percentile == "p50" else row.p99 or 0.0
        return summary.row("output_tokens_per_s", case=case).middle, y

    lines = [
        Line(f"{name} {each}", sorted(point(case, quantity, each) for case in summary.cases()))
        for name, quantity in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"))
        for each in ("p50", "p99")
    ]
    setup = summary.setup
    title = f"{setup['model']}, {setup['dataset']}, {summary.machine.commit}"
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
