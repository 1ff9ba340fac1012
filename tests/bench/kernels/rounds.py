"""Variants in turn, round after round.

Each round reads a buffer larger than any CPU cache, then runs every variant once, so that other
processes disturb all of them alike. Ratios are of the medians of a run.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import torch
from tests.bench import summary

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.extension import huge_zeros

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from tests.bench.summary import Summary

SWEEP_BYTES = 1 << 28
ROUNDS_MIN = 6
READ = "read"
"""The variant that reads the buffer."""


class Rounds:
    def __init__(self) -> None:
        self._sweep = huge_zeros(SWEEP_BYTES // 8, dtype=torch.int64)
        self._sweep.fill_(1)  # zeros that were never written are one page, read again and again

    def alternate(
        self, work: Mapping[str, Callable[[], object]], seconds: float
    ) -> dict[str, list[float]]:
        """Time each variant and the read before them, in ms, for about so long.

        With one thread, the time is that thread's CPU time, which other processes lengthen only by
        their use of memory.
        """
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        times: dict[str, list[float]] = {name: [] for name in (READ, *work)}
        turns = deque(work.items())
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or len(times[READ]) < ROUNDS_MIN:
            for name, once in ((READ, self._sweep.sum), *turns):
                start = clock()
                once()
                times[name].append((clock() - start) * 1e3)
            # The first variant finds nothing of its own in the CPU caches, so they alternate.
            turns.rotate(-1)
        return {name: taken[1:] for name, taken in times.items()}


def read_gb_s(times: Mapping[str, Sequence[float]]) -> float:
    """Return the rate of the plain reads among the times of `Rounds.alternate`."""
    return SWEEP_BYTES / median(times[READ]) / 1e6


def setup() -> dict[str, str | int | float]:
    return {"isa": extension.load().isa(), "threads": torch.get_num_threads()}


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = summary.arguments(description=description)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Summary]) -> None:
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.inference_mode():
        measured = measure(given)
    summary.report(measured, given.json)
