"""Which tests may be skipped, and how many: a skip that nobody expects is a failure.

Without a compiler whole modules would skip in silence, the determinism suite among them.
"""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ANYWHERE = {
    "has no": 3,  # a form of pictures lacks a mode of colours
    "no docker-compose on this machine": 3,
    "no curl on this machine": 1,
}
"""By a part of its reason, how many tests at most are skipped on every machine."""


def kernels_expected() -> bool:
    """Whether the CPU's own kernels have to be there: on every x86-64 with AVX2."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return platform.machine() == "x86_64" and " avx2 " in flags


def unexpected(reasons: Iterable[str], *, kernels: bool) -> list[str]:
    """Return a line for each reason for which more tests were skipped than may be.

    Args:
        reasons: Why each skipped test was skipped.
        kernels: Whether tests of the CPU's own kernels have to run.
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
