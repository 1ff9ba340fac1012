"""The section of many streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.page.markdown import machine_line, markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.summary import Summary

HEAD = """
## Many streams

{streams} concurrent chat streams over HTTP through one gateway. The worker computes nothing: it
sends one token per stream every 20 ms (`steady`), or tokens as fast as the services accept them
(`hasty`). A gap is the time between two events of a stream, as the client sees it; medians of
{rounds} windows of 6 s. Broker, services and clients share the cores:
[tests/bench/crowd](../tests/bench/crowd/__main__.py).
"""
PROFILE = """
Where the gateway's CPU time goes, in percent:

"""


def crowd(summary: Summary) -> Iterable[str]:
    yield HEAD.format(**summary.setup) + "\n"
    yield f"{machine_line(summary)}.\n\n"
    cases = summary.cases()
    processes = summary.arms("percent_of_core")
    yield markdown(
        ("worker", "events/s", "gap p50, ms", "gap p99, ms", "gateway, us/event", "% of a core"),
        (_crowd_row(summary, case, processes) for case in cases),
    )
    yield PROFILE
    yield markdown(
        ("part", *cases),
        (
            (part, *(f"{_share(summary, case, part):.1f}" for case in cases))
            for part in sorted(summary.arms("percent_of_gateway"))
        ),
    )


def _share(summary: Summary, case: str, part: str) -> float:
    row = summary.find("percent_of_gateway", case=case, arm=part)
    return 0.0 if row is None else row.middle


def _crowd_row(summary: Summary, case: str, processes: Sequence[str]) -> Sequence[str]:
    shares = {
        name: summary.row("percent_of_core", case=case, arm=name).middle for name in processes
    }
    return (
        case,
        f"{summary.row('events_per_s', case=case).middle:.0f}",
        f"{summary.row('gap_p50_ms', case=case).middle:.1f}",
        f"{summary.row('gap_p99_ms', case=case).middle:.1f}",
        f"{summary.row('gateway_us_per_event', case=case).middle:.1f}",
        ", ".join(f"{name} {share:.0f}" for name, share in shares.items()),
    )
