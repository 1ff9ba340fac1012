"""What was measured of a gateway with many streams."""

from __future__ import annotations

import msgspec
from tests.bench.figures import Machine
from tests.bench.summary import Measurement, Summary, measured, single


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """One window.

    Attributes:
        gaps_ms: Between two events of a stream: percentiles 50, 90, 99 and 100.
        percents: Of a core, by process.
        us_an_event: Processor time of the gateway.
    """

    events_per_s: float
    gaps_ms: tuple[float, float, float, float]
    percents: dict[str, float]
    us_an_event: float


class Profile(msgspec.Struct, frozen=True):
    """Where the gateway's processor time goes, in percent of it."""

    parts: dict[str, float]
    functions: dict[str, float]


class CrowdReport(msgspec.Struct, frozen=True, kw_only=True):
    """All windows: a worker with a model's pace, and one that is faster than any gateway."""

    machine: Machine
    streams: int
    windows: dict[str, list[Crowd]]
    profiles: dict[str, Profile]


def summarize(report: CrowdReport) -> Summary:
    """Reduce a run to the rows of its page section."""
    rows: list[Measurement] = []
    for case, windows in report.windows.items():
        rows += [
            measured("events_per_s", (each.events_per_s for each in windows), case=case),
            measured("gap_p50_ms", (each.gaps_ms[0] for each in windows), case=case),
            measured("gap_p90_ms", (each.gaps_ms[1] for each in windows), case=case),
            measured("gap_p99_ms", (each.gaps_ms[2] for each in windows), case=case),
            measured("gap_max_ms", (each.gaps_ms[3] for each in windows), case=case),
            measured("gateway_us_per_event", (each.us_an_event for each in windows), case=case),
        ]
        rows += [
            measured(
                "percent_of_core", (each.percents[name] for each in windows), case=case, arm=name
            )
            for name in windows[0].percents
        ]
    for case, profile in report.profiles.items():
        rows += [
            single("percent_of_gateway", share, case=case, arm=part)
            for part, share in profile.parts.items()
        ]
    return Summary(
        section="crowd",
        machine=report.machine,
        setup={"streams": report.streams, "rounds": min(map(len, report.windows.values()))},
        rows=tuple(rows),
    )
