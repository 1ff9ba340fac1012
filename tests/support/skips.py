"""Expected skips of tests and their number: an unexpected skip is a failure.

Without a compiler whole modules would be skipped silently, the determinism suite among them.
"""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ANYWHERE = {
    "has no": 3,  # an image format lacks a color mode
    "is not reached: not checked": 1,  # the index of torch's CPU builds, by a dry run of pip
    "no docker-compose on this machine": 4,
    "no curl on this machine": 1,
}
"""Maximum number of skipped tests on any machine, by a part of the reason."""


def kernels_expected() -> bool:
    """Whether the CPU kernels must be available: on every x86-64 with AVX2."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return platform.machine() == "x86_64" and " avx2 " in flags


def unexpected(reasons: Iterable[str], *, kernels: bool) -> list[str]:
    """Return a line for each reason with more skipped tests than expected.

    Args:
        reasons: The reason of each skipped test.
        kernels: Whether tests of the CPU kernels must run.
    """
    counts = Counter[str]()
    most = dict(ANYWHERE)
    for reason in reasons:
        known = next((part for part in ANYWHERE if part in reason), reason)
        if known not in most and not kernels:
            continue
        counts[known] += 1
    return [
        f"{count} tests skipped, {most.get(reason, 0)} expected: {reason}"
        for reason, count in sorted(counts.items())
        if count > most.get(reason, 0)
    ]
