"""The section of open load: people who come when they please, and how long they wait then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import markdown, where

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.bench.serving.metrics import Spread
    from tests.bench.serving.report import Report

PLOT = "open-load.svg"
HEAD = """
## People who come when they please

Conversations of the {model} shape over HTTP that begin at random (Poisson) and of which each turn
follows the answer before, `{dataset}`: turns, tokens in and tokens out. A line is one run, whose
beginning and end count. Times are ms, p50 and p99; good are requests that keep
{slo}.
"""


def open_load(report: Report) -> Iterable[str]:
    slo = report.runs[0].slo
    promises = [] if slo is None else slo.promises()
    said = " and ".join(f"{name} <= {most:g} ms" for name, most in promises)
    dataset = report.runs[0].dataset
    yield HEAD.format(model=report.model, dataset=dataset, slo=said or "nothing: none asked") + "\n"
    yield where(report.machine, report.device) + "\n"
    yield markdown(
        (
            *("begun a second", "requests", "out tok/s", "TTFT", "TPOT", "ITL", "requests/s"),
            *("good", "others, % of the cores"),
        ),
        (
            (
                run.arrival.removeprefix("poisson:"),
                f"{run.metrics.requests - run.metrics.failed} of {run.metrics.requests}",
                f"{run.metrics.output_tokens_per_s:.0f}",
                _times(run.metrics.ttft_ms),
                _times(run.metrics.tpot_ms),
                _times(run.metrics.itl_ms),
                f"{run.metrics.requests_per_s:.2f}",
                "" if run.metrics.goodput is None else f"{run.metrics.goodput:.2f}",
                "not looked at" if run.others is None else f"{100 * run.others:.0f}",
            )
            for run in report.runs
        ),
    )
    yield f"\n![Times against throughput]({PLOT})\n"


def _times(spread: Spread) -> str:
    return f"{spread.p50:.0f}, {spread.p99:.0f}"
