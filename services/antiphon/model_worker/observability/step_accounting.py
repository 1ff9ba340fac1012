"""Step accounting: log lines and spans of choices, metrics and load statistics."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.state import Progress
from antiphon.model_worker.observability.metrics import WorkerMetrics, WorkerSize
from antiphon.telemetry.tracing import Span, span
from antiphon.wire.codec import id_count
from antiphon.wire.heartbeat import WorkerStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.state import AnyProgress, ChoiceKey, CoreTotals
    from antiphon.model_worker.protocol.worker_output import RunChoice
    from antiphon.resolve.resolved_config import ResolvedConfig as Resolved
    from antiphon.telemetry.metrics import Metrics


log = logging.getLogger(__name__)

REPORTS_MAX = 64
"""Maximum number of uncounted reports: a second of a large model, less of a small one."""


OUTPUT_S = 10
"""Window of the throughput."""
PROMPTS_S = 60
"""Window of the prefix cache hit rate."""
DRAFTS_S = 60
"""Window of the rate of accepted drafts."""


class StepAccounting:
    """Counts the reports of the batching loop, off its critical path.

    A report is only stored when it arrives, in the loop's thread, and counted with others in the
    event loop's thread: for a heartbeat, a scrape, or a choice that ends, so that its log line and
    its span end in time, or because the store is `full`. Between two steps the weights evict this
    code from the processor's caches: counted one by one, each report took 30 us. Times are
    `Clock.now`.
    """

    def __init__(
        self,
        metrics: Metrics,
        size: WorkerSize,
        resolved: Resolved | None,
        decode_log_interval: int = 40,
    ) -> None:
        self.metrics = WorkerMetrics(metrics, size)
        self._step_log = StepLog(decode_log_interval, size)
        self._request_log = WorkerRequestLog()
        self._load_stats = LoadStats(resolved)
        self._uncounted: deque[tuple[StepReport, float]] = deque()
        metrics.before_collect(self._flush)

    @property
    def full(self) -> bool:
        """Whether it is time to count the stored reports."""
        return len(self._uncounted) >= REPORTS_MAX

    def begin(self, run: RunChoice, now: float) -> None:
        self._request_log.begin(run, now)

    def drop(self, key: ChoiceKey, now: float) -> None:
        self.process_pending()
        self._request_log.drop(key, now)

    def record(self, report: StepReport, now: float) -> None:
        """Store a report of the loop."""
        self._uncounted.append((report, now))

    def process_pending(self) -> None:
        for _ in range(len(self._uncounted)):
            report, now = self._uncounted.popleft()
            try:
                self._request_log.step(report.progress, now)
                tokens = _output_tokens(report)
                self.metrics.observe(report, tokens)
                self._load_stats.observe(report, tokens, now)
                self._step_log.step(report, tokens, now)
            except Exception:
                # Monitoring only: no request depends on it.
                log.exception("report not counted", extra={"step": report.step})

    def load_stats(self, last: StepReport, *, grammars: int, now: float) -> WorkerStats:
        self.process_pending()
        stats = self._load_stats.snapshot(last, grammars=grammars, now=now)
        self.metrics.show_load_stats(stats)
        return stats

    def _flush(self) -> None:
        self.process_pending()
        self.metrics.flush()


def _output_tokens(report: StepReport) -> int:
    return sum(
        news.end - news.start if isinstance(news, Progress) else len(news)
        for news in report.progress
    )


class SlidingSum:
    """A sum over a sliding window, to the second."""

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        self._seconds: deque[tuple[int, int]] = deque()
        self._sum = 0

    def add(self, amount: int, now: float) -> None:
        second = int(now)
        self._sum += amount
        if self._seconds and self._seconds[-1][0] == second:
            amount += self._seconds.pop()[1]
        self._seconds.append((second, amount))
        self._forget(second)

    def total(self, now: float) -> int:
        self._forget(int(now))
        return self._sum

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            self._sum -= self._seconds.popleft()[1]


class LoadStats:
    """Recent load statistics of a worker, and its sizes: for monitoring, not for placement."""

    def __init__(self, resolved: Resolved | None) -> None:
        self._device = "" if resolved is None else str(resolved.device.value)
        self._weight_bytes = 0 if resolved is None else resolved.weight_bytes.value
        self._cache_bytes = 0 if resolved is None else resolved.cache_bytes.value
        if resolved is not None and (draft := resolved.draft.value) is not None:
            self._weight_bytes += draft.weight_bytes.value
        self._output = SlidingSum(OUTPUT_S)
        self._prompts = SlidingSum(PROMPTS_S)
        self._cached = SlidingSum(PROMPTS_S)
        self._drafts = SlidingSum(DRAFTS_S), SlidingSum(DRAFTS_S), SlidingSum(DRAFTS_S)
        self._drafts_counted = (0, 0, 0)

    def observe(self, report: StepReport, output_tokens: int, now: float) -> None:
        if output_tokens:
            self._output.add(output_tokens, now)
        if report.started:
            self._prompts.add(report.prompt_tokens, now)
            self._cached.add(report.cached_tokens, now)
        totals = report.totals
        drafts = totals.verify_rows, totals.drafts_proposed, totals.drafts_accepted
        if drafts != self._drafts_counted:
            for recent, count, before in zip(
                self._drafts, drafts, self._drafts_counted, strict=True
            ):
                recent.add(count - before, now)
            self._drafts_counted = drafts

    def snapshot(self, last: StepReport, *, grammars: int, now: float) -> WorkerStats:
        rows, proposed, accepted = (recent.total(now) for recent in self._drafts)
        return WorkerStats(
            device=self._device,
            weight_bytes=self._weight_bytes,
            cache_bytes=self._cache_bytes,
            output_tokens_s=self._output.total(now) / OUTPUT_S,
            prompt_tokens=self._prompts.total(now),
            cached_tokens=self._cached.total(now),
            waiting_tokens=last.capacity.waiting_tokens,
            retracted=last.capacity.waiting_retracted,
            grammars=grammars,
            pages_cached=last.capacity.pages_evictable,
            verify_rows=rows,
            drafts_proposed=proposed,
            drafts_accepted=accepted,
        )


@dataclass
class StepLog:
    """Logs each prefill batch, every `interval`-th decode batch, and retractions."""

    interval: int
    size: WorkerSize
    _decodes: int = 0
    _generated: int = 0
    _decoded_at: float | None = None
    _prefilled: int = 0
    _prefilled_at: float | None = None
    _retractions: int = 0
    _retracted_tokens: int = 0
    _ratio: float | None = None

    def step(self, report: StepReport, output_tokens: int, now: float) -> None:
        if report.totals.retractions > self._retractions:
            self._retraction(report.totals)
        self._ratio = report.totals.new_token_ratio
        self._generated += output_tokens
        if not report.rows:
            return
        if report.prefill_rows:
            self._prefill(report, now)
            return
        self._decodes += 1
        if self._decodes % self.interval == 0:
            self._decode(report, now)

    def _prefill(self, report: StepReport, now: float) -> None:
        log.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, #pending-token: %d, cuda graph: %s, "
            "input throughput (token/s): %.2f",
            report.prefill_rows,
            report.prefill_tokens,
            report.cached_tokens,
            self.size.usage(report),
            max(0, report.totals.running - report.prefill_rows),
            report.totals.waiting,
            report.capacity.waiting_tokens,
            self.size.replays(report),
            _rate(self._prefilled, self._prefilled_at, now),
        )
        self._prefilled, self._prefilled_at = report.prefill_tokens, now

    def _decode(self, report: StepReport, now: float) -> None:
        log.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, cuda graph: %s, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            report.totals.running,
            self.size.used_pages(report) * self.size.page_tokens,
            self.size.usage(report),
            self.size.replays(report),
            _rate(self._generated, self._decoded_at, now),
            report.totals.waiting,
        )
        self._generated, self._decoded_at = 0, now

    def _retraction(self, totals: CoreTotals) -> None:
        before = totals.new_token_ratio if self._ratio is None else self._ratio
        log.warning(
            "KV cache pool is full. Retract requests. #retracted_reqs: %d, "
            "#new_tokens_gained: %d, #new_token_ratio: %.4f -> %.4f",
            totals.retractions - self._retractions,
            totals.retracted_tokens - self._retracted_tokens,
            before,
            totals.new_token_ratio,
        )
        self._retractions = totals.retractions
        self._retracted_tokens = totals.retracted_tokens


def _rate(tokens: int, since: float | None, now: float) -> float:
    return 0.0 if since is None or now <= since else tokens / (now - since)


@dataclass(slots=True)
class _LoggedChoice:
    run: RunChoice
    span: Span
    began: float
    first_s: float | None = None


class WorkerRequestLog:
    """One log line and one span for each choice, from when it is added to the loop to its end.

    Times are `Clock.now`.
    """

    def __init__(self) -> None:
        self._entries: dict[ChoiceKey, _LoggedChoice] = {}

    def begin(self, run: RunChoice, now: float) -> None:
        here = span("worker.generate", run.traceparent, request_id=run.state.request_id).start()
        self._entries[run.key] = _LoggedChoice(run, here, now)

    def step(self, progress: Iterable[AnyProgress], now: float) -> None:
        """Note first tokens and ends. Neither is among the sampled tokens of a report."""
        for news in progress:
            if not isinstance(news, Progress) or (entry := self._entries.get(news.key)) is None:
                continue
            if entry.first_s is None and news.end > news.start:
                entry.first_s = now - entry.began
            if news.finish is not None:
                error = news.finish.error
                self._end(entry, now, error.code if error else news.finish.reason.value)

    def drop(self, key: ChoiceKey, now: float) -> None:
        """End a choice that was dropped: a stop string, an abort, a deadline."""
        if (entry := self._entries.get(key)) is not None:
            self._end(entry, now, "dropped")

    def _end(self, entry: _LoggedChoice, now: float, reason: str) -> None:
        state = entry.run.state
        del self._entries[entry.run.key]
        tokens = entry.run.choice.length - id_count(state.output_ids)
        entry.span.set(output_tokens=tokens, reason=reason)
        entry.span.end()
        log.info(
            "choice ended",
            extra={
                "request_id": state.request_id,
                "choice": state.choice,
                "reason": reason,
                "prompt_tokens": id_count(state.prompt_ids),
                "output_tokens": tokens,
                "first_token_s": entry.first_s,
                "seconds": now - entry.began,
            },
        )
