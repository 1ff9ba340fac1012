"""The section of open-loop load: latency under Poisson arrivals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import device_line, markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Measurement, Summary

PLOT = "open-load.svg"
HEAD = """
## Open-loop load (Poisson arrivals)

Multi-turn conversations, the {model} shape, over HTTP. Conversations start at random times (a
Poisson process), and each turn follows the previous response. Dataset `{dataset}`: turns, input
tokens and output tokens. A row is one run, including its ramp-up and ramp-down. Times are p50 and
p99 in ms. Goodput counts requests with {slo}.
"""


def open_load(summary: Summary) -> Iterable[str]:
    setup = summary.setup
    yield HEAD.format_map(setup | {"slo": setup["slo"] or "no SLO: none was set"}) + "\n"
    yield device_line(summary) + "\n"
    yield markdown(
        (
            *("conversations/s", "requests", "out tok/s", "TTFT", "TPOT", "ITL", "requests/s"),
            *("goodput", "CPU of other processes, %"),
        ),
        (_cells(summary, case) for case in summary.cases()),
    )
    yield f"\n![Latency against throughput]({PLOT})\n"


def _cells(summary: Summary, case: str) -> Sequence[str]:
    def row(quantity: str) -> Measurement:
        return summary.row(quantity, case=case)

    requests = row("requests").middle
    goodput = summary.find("goodput", case=case)
    others = summary.find("others", case=case)
    return (
        case.removeprefix("poisson:"),
        f"{requests - row('failed').middle:.0f} of {requests:.0f}",
        f"{row('output_tokens_per_s').middle:.0f}",
        *(_times(row(quantity)) for quantity in ("ttft_ms", "tpot_ms", "itl_ms")),
        f"{row('requests_per_s').middle:.2f}",
        "" if goodput is None else f"{goodput.middle:.2f}",
        "not measured" if others is None else f"{100 * others.middle:.0f}",
    )


def _times(row: Measurement) -> str:
    return f"{row.middle:.0f}, {row.p99:.0f}"
