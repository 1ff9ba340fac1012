"""What was measured of a gateway with many streams."""

from __future__ import annotations

import msgspec
from tests.bench.figures import Machine


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
