"""Numbers with their spread, and where they were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Figure(msgspec.Struct, frozen=True):
    """A distribution in three numbers."""

    p50: float
    p10: float
    p90: float


class Machine(msgspec.Struct, frozen=True):
    """Where and of what a result is; a commit that ends in `-dirty` was not all of it."""

    commit: str
    cpu: str
    cores: int
    load: float


def figure(values: Sequence[float]) -> Figure:
    """Sum up measurements."""
    tenths = quantiles(values, n=10)
    return Figure(round(median(values), 4), round(tenths[0], 4), round(tenths[-1], 4))


def machine() -> Machine:
    """Describe this machine and commit."""
    commit = subprocess.run(
        ["git", "--no-optional-locks", "describe", "--always", "--dirty"],
        capture_output=True,
        check=False,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0] if names else platform.processor()
    return Machine(commit, cpu, os.cpu_count() or 0, round(os.getloadavg()[0], 2))
