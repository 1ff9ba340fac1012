"""Distributions of measurements, and the machine that they were taken on."""

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


INSTRUCTIONS = (
    ("amx", "amx_bf16"),
    ("avx512bf16", "avx512_bf16"),
    ("avx512", "avx512f"),
    ("avx2", "avx2"),
)
"""Instruction sets of the kernels, the best one first, with the CPU flag that each needs."""


class Figure(msgspec.Struct, frozen=True):
    """A distribution in three numbers, of `n` values; None in results that are older."""

    p50: float
    p10: float
    p90: float
    n: int | None = None


class Machine(msgspec.Struct, frozen=True):
    """Machine and commit of a result; `-dirty` marks uncommitted changes."""

    commit: str
    cpu: str
    cores: int
    load: float


def figure(values: Sequence[float]) -> Figure:
    """Reduce measurements."""
    tenths = quantiles(values, n=10)
    return Figure(round(median(values), 4), round(tenths[0], 4), round(tenths[-1], 4), len(values))


def machine() -> Machine:
    """Describe this machine and commit."""
    commit = subprocess.run(
        ["git", "--no-optional-locks", "describe", "--always", "--dirty"],
        capture_output=True,
        check=False,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    cpu = _said("model name") or platform.processor()
    return Machine(commit, cpu, os.cpu_count() or 0, round(os.getloadavg()[0], 2))


def instructions() -> str:
    """Return the instruction set that the kernels choose here, without loading them."""
    flags = _said("flags").split()
    return next((name for name, flag in INSTRUCTIONS if flag in flags), platform.machine())


def _said(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; empty if it is missing."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""
