"""The section of open load: people who come when they please, and how long they wait then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import markdown, where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Measurement, Summary

PLOT = "open-load.svg"
HEAD = """
## People who come when they please

Conversations of the {model} shape over HTTP that begin at random (Poisson) and of which each turn
follows the answer before, `{dataset}`: turns, tokens in and tokens out. A line is one run, whose
beginning and end count. Times are ms, p50 and p99; good are requests that keep
{slo}.
"""


def open_load(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield HEAD.format_map(setup | {"slo": setup["slo"] or "nothing: none asked"}) + "\n"
    yield where(summary) + "\n"
    yield markdown(
        (
            *("begun a second", "requests", "out tok/s", "TTFT", "TPOT", "ITL", "requests/s"),
            *("good", "others, % of the cores"),
        ),
        (_cells(summary, case) for case in summary.cases()),
    )
    yield f"\n![Times against throughput]({PLOT})\n"


def _cells(summary: Summary, case: str) -> Sequence[str]:
    def row(quantity: str) -> Measurement:
        return summary.row(quantity, case=case)

    requests = row("requests").middle
    good = summary.find("goodput", case=case)
    others = summary.find("others", case=case)
    return (
        case.removeprefix("poisson:"),
        f"{requests - row('failed').middle:.0f} of {requests:.0f}",
        f"{row('output_tokens_per_s').middle:.0f}",
        *(_times(row(quantity)) for quantity in ("ttft_ms", "tpot_ms", "itl_ms")),
        f"{row('requests_per_s').middle:.2f}",
        "" if good is None else f"{good.middle:.2f}",
        "not looked at" if others is None else f"{100 * others.middle:.0f}",
    )


def _times(row: Measurement) -> str:
    return f"{row.middle:.0f}, {row.p99:.0f}"
