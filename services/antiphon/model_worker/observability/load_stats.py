"""Recent load statistics of a worker, and its sizes: for monitoring, not for placement."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from antiphon.wire.heartbeat import WorkerStats

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.resolve.resolved_config import ResolvedConfig as Resolved

OUTPUT_S = 10
"""Window of the throughput."""
PROMPTS_S = 60
"""Window of the prefix cache hit rate."""


class SlidingSum:
    """A sum over a sliding window, to the second."""

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        self._seconds: deque[tuple[int, int]] = deque()
        self._sum = 0

    def add(self, amount: int, now: float) -> None:
        """Add an amount at `now`."""
        second = int(now)
        self._sum += amount
        if self._seconds and self._seconds[-1][0] == second:
            amount += self._seconds.pop()[1]
        self._seconds.append((second, amount))
        self._forget(second)

    def total(self, now: float) -> int:
        """The sum of the window."""
        self._forget(int(now))
        return self._sum

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            self._sum -= self._seconds.popleft()[1]


class LoadStats:
    """Collects load statistics from the reports of the batching loop."""

    def __init__(self, resolved: Resolved | None) -> None:
        """Make empty statistics. An engine that runs no model has no resolved configuration."""
        self._device = "" if resolved is None else str(resolved.device.value)
        self._weight_bytes = 0 if resolved is None else resolved.weight_bytes.value
        self._cache_bytes = 0 if resolved is None else resolved.cache_bytes.value
        self._output = SlidingSum(OUTPUT_S)
        self._prompts = SlidingSum(PROMPTS_S)
        self._cached = SlidingSum(PROMPTS_S)

    def observe(self, report: StepReport, output_tokens: int, now: float) -> None:
        """Count a turn of the loop, which generated `output_tokens` tokens."""
        if output_tokens:
            self._output.add(output_tokens, now)
        if report.started:
            self._prompts.add(report.prompt_tokens, now)
            self._cached.add(report.cached_tokens, now)

    def snapshot(self, last: StepReport, *, grammars: int, now: float) -> WorkerStats:
        """The heartbeat's statistics; `grammars` requests wait for their grammars."""
        return WorkerStats(
            device=self._device,
            weight_bytes=self._weight_bytes,
            cache_bytes=self._cache_bytes,
            output_tokens_s=self._output.total(now) / OUTPUT_S,
            prompt_tokens=self._prompts.total(now),
            cached_tokens=self._cached.total(now),
            waiting_tokens=last.backlog.tokens,
            retracted=last.backlog.retracted,
            grammars=grammars,
            pages_cached=last.credit.pages_evictable,
        )
