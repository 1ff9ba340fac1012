"""Times of calls on a GPU, by its own clock, and the rates that they are compared with."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROUNDS = 20
SWEEP_BYTES = 1 << 30
"""Written before each call: no cache keeps what the call reads, and the host is ahead of it."""
COPY_BYTES = 1 << 30
PRODUCT_SIDE = 8192


class Stopwatch:
    """Median times; on the CPU, where the interpreter computes, of one call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timed = device.type == "cuda"
        if self._timed:
            self._sweep = torch.empty(SWEEP_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Of a call that launches and waits for nothing."""
        call()  # compiles
        if not self._timed:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        taken: list[float] = []
        for _ in range(ROUNDS):
            begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._sweep.zero_()
            begins.record()
            call()
            ends.record()
            ends.synchronize()
            taken.append(begins.elapsed_time(ends) / 1e3)
        return median(taken)

    def copy_rate(self, size_bytes: int = COPY_BYTES) -> float:
        """Bytes a second that are read and written by a copy."""
        source = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size_bytes / self.seconds(lambda: target.copy_(source))

    def product_rate(self, side: int = PRODUCT_SIDE) -> float:
        """Operations a second of torch's product of square matrices in bfloat16."""
        a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return 2 * side**3 / self.seconds(lambda: a @ b)


def idle_share(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The share of a span of time in which none of these intervals, which may overlap, lies."""
    busy, reached = 0.0, begin
    for start, stop in sorted(intervals):
        if min(stop, end) > reached:
            busy += min(stop, end) - max(start, reached)
            reached = min(stop, end)
    return 1.0 - busy / (end - begin)
