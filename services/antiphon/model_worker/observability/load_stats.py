"""What a worker has done lately, and what it is made of: for whoever watches, not for placement."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from antiphon.wire.heartbeat import WorkerStats

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.resolve.resolved_config import ResolvedConfig as Resolved

OUTPUT_S = 10
"""Over how long the throughput is taken."""
PROMPTS_S = 60
"""Over how long the hit rate is."""


class SlidingSum:
    """A sum over the last so many seconds, to the second."""

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        self._seconds: deque[tuple[int, int]] = deque()
        self._sum = 0

    def add(self, amount: int, now: float) -> None:
        """Count something that happens now."""
        second = int(now)
        self._sum += amount
        if self._seconds and self._seconds[-1][0] == second:
            amount += self._seconds.pop()[1]
        self._seconds.append((second, amount))
        self._forget(second)

    def total(self, now: float) -> int:
        """All that was counted within the window."""
        self._forget(int(now))
        return self._sum

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            self._sum -= self._seconds.popleft()[1]


class LoadStats:
    """Counts what the batching loop reports."""

    def __init__(self, resolved: Resolved | None) -> None:
        """Nothing has happened yet. An engine that runs no model has no plan."""
        self._device = "" if resolved is None else str(resolved.device.value)
        self._weight_bytes = 0 if resolved is None else resolved.weight_bytes.value
        self._cache_bytes = 0 if resolved is None else resolved.cache_bytes.value
        self._output = SlidingSum(OUTPUT_S)
        self._prompts = SlidingSum(PROMPTS_S)
        self._cached = SlidingSum(PROMPTS_S)

    def observe(self, report: StepReport, output_tokens: int, now: float) -> None:
        """Take note of a turn of the loop, which told so many tokens."""
        if output_tokens:
            self._output.add(output_tokens, now)
        if report.started:
            self._prompts.add(report.prompt_tokens, now)
            self._cached.add(report.cached_tokens, now)

    def snapshot(self, last: StepReport, *, grammars: int, now: float) -> WorkerStats:
        """What the heartbeat says of it; so many answers wait for their grammars."""
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
