"""The section of many streams."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from tests.bench.page.markdown import markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.crowd.report import Crowd, CrowdReport

HEAD = """
## Many streams

{streams} chats streamed at a time over HTTP through one gateway, with a worker that says their
tokens at a pace: every 20 ms one each, and as fast as the services take them. A gap is between two
events of a stream, seen by the client; medians of {rounds} windows of 6 s. Broker, services and
clients share the cores: [tests/bench/crowd](../tests/bench/crowd/__main__.py).
"""
PROFILE = """
Where the gateway's processor time goes, in percent of it:

"""


def crowd(report: CrowdReport) -> Iterable[str]:
    rounds = min(map(len, report.windows.values()))
    yield HEAD.format(streams=report.streams, rounds=rounds) + "\n"
    machine = report.machine
    yield f"{machine.cpu}, {machine.cores} cores, commit {machine.commit}.\n\n"
    processes = list(next(iter(report.windows.values()))[0].percents)
    yield markdown(
        ("worker", "events/s", "gap p50, ms", "gap p99, ms", "gateway, us an event", "% of a core"),
        (_crowd_row(name, windows, processes) for name, windows in report.windows.items()),
    )
    yield PROFILE
    parts = sorted({part for profile in report.profiles.values() for part in profile.parts})
    yield markdown(
        ("part", *report.profiles),
        (
            (part, *(f"{profile.parts.get(part, 0.0):.1f}" for profile in report.profiles.values()))
            for part in parts
        ),
    )


def _crowd_row(name: str, windows: Sequence[Crowd], processes: Sequence[str]) -> Sequence[str]:
    shares = {each: median(window.percents[each] for window in windows) for each in processes}
    return (
        name,
        f"{median(window.events_per_s for window in windows):.0f}",
        f"{median(window.gaps_ms[0] for window in windows):.1f}",
        f"{median(window.gaps_ms[2] for window in windows):.1f}",
        f"{median(window.us_an_event for window in windows):.1f}",
        ", ".join(f"{each} {share:.0f}" for each, share in shares.items()),
    )
