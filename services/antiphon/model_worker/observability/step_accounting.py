"""What steps came to: log lines and spans of choices, and numbers for those who watch."""

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
    from antiphon.model_worker.batching.request import ChoiceKey
    from antiphon.model_worker.protocol.worker_output import RunChoice
    from antiphon.resolve.resolved_config import ResolvedConfig as Resolved
    from antiphon.telemetry.metrics import Metrics
    from antiphon.wire.heartbeat import WorkerStats

log = logging.getLogger(__name__)

REPORTS_MAX = 64
"""Reports that wait to be counted: a second of a large model, some heartbeats of a small one."""


class StepAccounting:
    """Counts the reports of the batching loop, which no step waits for.

    A report is only put down when it comes, and counted with others when somebody wants to know: a
    heartbeat, a scrape, or a choice that ends, so that its log line and its span end when it does.
    Between two steps the weights drive this code out of the caches: counted one by one, each
    report took 30 us. While these are not `full`, any thread may put down a report that ends nobody
    if their owner sees to it that no other does. Times are `Clock.now`.
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
        """Whether the next report will be counted at once, with those that wait."""
        return len(self._uncounted) >= REPORTS_MAX - 1

    def begin(self, run: RunChoice, now: float) -> None:
        """A choice goes to the loop."""
        self._request_log.begin(run, now)

    def drop(self, key: ChoiceKey, now: float) -> None:
        """A choice was taken back."""
        self.process_pending()
        self._request_log.drop(key, now)

    def record(self, report: StepReport, now: float, *, ended: bool) -> None:
        """The loop has reported; some choice has `ended`, or none."""
        self._uncounted.append((report, now))
        if ended or len(self._uncounted) >= REPORTS_MAX:
            self.process_pending()

    def process_pending(self) -> None:
        """Take in what was put down."""
        for _ in range(len(self._uncounted)):
            report, now = self._uncounted.popleft()
            try:
                tokens = self._request_log.step(report.progress, now)
                self.metrics.observe(report, tokens)
                self._load_stats.observe(report, tokens, now)
                self._step_log.step(report, tokens, now)
            except Exception:
                # Numbers for those who watch: no answer depends on them.
                log.exception("report not counted", extra={"step": report.step})

    def load_stats(self, last: StepReport, *, grammars: int, now: float) -> WorkerStats:
        """What the heartbeat says; so many answers wait for their grammars."""
        self.process_pending()
        figures = self._load_stats.snapshot(last, grammars=grammars, now=now)
        self.metrics.show_load_stats(figures)
        return figures

    def _flush(self) -> None:
        self.process_pending()
        self.metrics.flush()
