"""Step accounting: log lines and spans of choices, metrics and load statistics."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from antiphon.model_worker.observability.load_stats import LoadStats
from antiphon.model_worker.observability.metrics import WorkerMetrics, WorkerSize
from antiphon.model_worker.observability.request_log import WorkerRequestLog
from antiphon.model_worker.observability.step_log import StepLog

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.state import ChoiceKey
    from antiphon.model_worker.protocol.worker_output import RunChoice
    from antiphon.resolve.resolved_config import ResolvedConfig as Resolved
    from antiphon.telemetry.metrics import Metrics
    from antiphon.wire.heartbeat import WorkerStats

log = logging.getLogger(__name__)

REPORTS_MAX = 64
"""Maximum number of uncounted reports: a second of a large model, less of a small one."""


class StepAccounting:
    """Counts the reports of the batching loop, off its critical path.

    A report is only stored when it arrives, and counted with others when it is needed: for a
    heartbeat, a scrape, or a choice that ends, so that its log line and its span end in time.
    Between two steps the weights evict this code from the processor's caches: counted one by one,
    each report took 30 us. While it is not `full`, any thread may record a report in which no
    choice ends, if the caller excludes other threads. Times are `Clock.now`.
    """

    def __init__(
        self,
        metrics: Metrics,
        size: WorkerSize,
        resolved: Resolved | None,
        decode_log_interval: int = 40,
    ) -> None:
        self.metrics = WorkerMetrics(metrics, size)
        self._step_log = StepLog(decode_log_interval, size.pages_total, size.page_tokens)
        self._request_log = WorkerRequestLog()
        self._load_stats = LoadStats(resolved)
        self._uncounted: deque[tuple[StepReport, float]] = deque()
        metrics.before_collect(self._flush)

    @property
    def full(self) -> bool:
        """Whether the next report will be counted at once, with the stored ones."""
        return len(self._uncounted) >= REPORTS_MAX - 1

    def begin(self, run: RunChoice, now: float) -> None:
        """Note that a choice is added to the loop."""
        self._request_log.begin(run, now)

    def drop(self, key: ChoiceKey, now: float) -> None:
        """Note that a choice was dropped."""
        self.process_pending()
        self._request_log.drop(key, now)

    def record(self, report: StepReport, now: float, *, ended: bool) -> None:
        """Store a report of the loop; `ended`: whether a choice has ended."""
        self._uncounted.append((report, now))
        if ended or len(self._uncounted) >= REPORTS_MAX:
            self.process_pending()

    def process_pending(self) -> None:
        """Count the stored reports."""
        for _ in range(len(self._uncounted)):
            report, now = self._uncounted.popleft()
            try:
                tokens = self._request_log.step(report.progress, now)
                self.metrics.observe(report, tokens)
                self._load_stats.observe(report, tokens, now)
                self._step_log.step(report, tokens, now)
            except Exception:
                # Monitoring only: no request depends on it.
                log.exception("report not counted", extra={"step": report.step})

    def load_stats(self, last: StepReport, *, grammars: int, now: float) -> WorkerStats:
        """The heartbeat's statistics; `grammars` requests wait for their grammars."""
        self.process_pending()
        stats = self._load_stats.snapshot(last, grammars=grammars, now=now)
        self.metrics.show_load_stats(stats)
        return stats

    def _flush(self) -> None:
        self.process_pending()
        self.metrics.flush()
