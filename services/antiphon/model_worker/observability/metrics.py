"""The worker's Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.telemetry import catalog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.page_budget import Capacity, PoolUse
    from antiphon.telemetry.catalog import MetricSpec
    from antiphon.telemetry.metrics import Metrics
    from antiphon.wire.heartbeat import WorkerStats

SECONDS_MAX = 4096
"""Maximum number of step times that are stored until the next scrape."""


class WorkerSize(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a worker."""

    pages_total: int
    page_tokens: int = 1
    running_max: int = 0
    context_tokens: int = 0


_SWA = (
    catalog.SWA_AVAILABLE_TOKENS,
    catalog.SWA_EVICTABLE_TOKENS,
    catalog.SWA_USED_TOKENS,
    catalog.SWA_TOKEN_USAGE,
    catalog.MAX_TOTAL_NUM_TOKENS_SWA,
)
_MAMBA = (
    catalog.MAMBA_AVAILABLE,
    catalog.MAMBA_EVICTABLE,
    catalog.MAMBA_USED,
    catalog.MAMBA_USAGE,
)


class PoolGauges:
    """The usage of one kind of cache.

    Gauges of free, evictable and used pages, the used share, and the total where there is one.
    """

    def __init__(self, metrics: Metrics, families: Sequence[MetricSpec], page_tokens: int) -> None:
        gauges = [metrics.gauge(family) for family in families]
        self._free, self._evictable, self._used, self._usage, *self._total = gauges
        self._page_tokens = page_tokens

    def show(self, use: PoolUse) -> None:
        """Set the gauges."""
        self._free.set(use.free * self._page_tokens)
        self._evictable.set(use.evictable * self._page_tokens)
        self._used.set(use.used * self._page_tokens)
        self._usage.set(use.used / use.total if use.total else 0.0)
        for total in self._total:
            total.set(use.total * self._page_tokens)


class WorkerMetrics:
    """Metrics of the batching loop and of the worker's load."""

    def __init__(self, metrics: Metrics, size: WorkerSize) -> None:
        self._size = size
        self._last: StepReport | None = None
        self._seconds: list[tuple[float, bool]] = []
        self._computed_tokens = self._prefill_tokens = 0
        self._cached_tokens = self._output_tokens = 0
        self._retractions_seen = self._preemptions_seen = self._failures_seen = 0
        self._overrun_seen = 0
        self._step_seconds = metrics.histogram(catalog.STEP_SECONDS)
        forward = metrics.counter(catalog.FORWARD_SECONDS)
        self._extend_s, self._decode_s = forward.labels("extend"), forward.labels("decode")
        tokens = metrics.counter(catalog.REALTIME_TOKENS)
        self._prefilled = tokens.labels("prefill_compute")
        self._cached = tokens.labels("prefill_cache")
        self._decoded = tokens.labels("decode")
        self._computed = metrics.counter(catalog.COMPUTED_TOKENS)
        self._retractions = metrics.counter(catalog.NUM_RETRACTIONS)
        self._retracted_input = metrics.counter(catalog.RETRACTED_INPUT_TOKENS)
        self._retracted_output = metrics.counter(catalog.RETRACTED_OUTPUT_TOKENS)
        self._retracted_prompts_seen = self._retracted_tokens_seen = 0
        self._sequences = metrics.gauge(catalog.DECODE_SUM_SEQ_LENS)
        self._weight_load = metrics.gauge(catalog.WEIGHT_LOAD_SECONDS)
        self._preemptions = metrics.counter(catalog.NUM_PREEMPTIONS)
        self._failures = metrics.counter(catalog.FAILED_STEPS)
        self._stalls = metrics.counter(catalog.STALLS)
        self.refused = metrics.counter(catalog.REFUSED_COMMANDS)
        self._overrun = metrics.counter(catalog.OVERRUN_TOKENS)
        self._paused = metrics.gauge(catalog.PAUSED_WORKERS)
        self._rows = metrics.gauge(catalog.BATCH_SIZE)
        self._running = metrics.gauge(catalog.NUM_RUNNING_REQS)
        self._waiting = metrics.gauge(catalog.NUM_QUEUE_REQS)
        self._paused_reqs = metrics.gauge(catalog.NUM_PAUSED_REQS)
        self._retracted = metrics.gauge(catalog.NUM_RETRACTED_REQS)
        self._grammar_queue = metrics.gauge(catalog.NUM_GRAMMAR_QUEUE_REQS)
        self._slots_free = metrics.gauge(catalog.FREE_SLOTS)
        self._used_tokens = metrics.gauge(catalog.KV_USED_TOKENS)
        self._evictable_tokens = metrics.gauge(catalog.KV_EVICTABLE_TOKENS)
        self._available_tokens = metrics.gauge(catalog.KV_AVAILABLE_TOKENS)
        self._token_usage = metrics.gauge(catalog.TOKEN_USAGE)
        self._utilization = metrics.gauge(catalog.UTILIZATION)
        self._ratio = metrics.gauge(catalog.NEW_TOKEN_RATIO)
        self._throughput = metrics.gauge(catalog.GEN_THROUGHPUT)
        self._hit_rate = metrics.gauge(catalog.CACHE_HIT_RATE)
        self._weight_bytes = metrics.gauge(catalog.WEIGHT_BYTES)
        self._cache_bytes = metrics.gauge(catalog.KV_CACHE_BYTES)
        self._held = metrics.gauge(catalog.HELD_REQS)
        self._metrics = metrics
        self._evicted = metrics.counter(catalog.EVICTED_TOKENS)
        self._evicted_seen = 0
        self._window: PoolGauges | None = None
        self._states: PoolGauges | None = None
        self._startup = metrics.gauge(catalog.STARTUP_SECONDS)
        metrics.gauge(catalog.NUM_PAGES).set(size.pages_total)
        metrics.gauge(catalog.PAGE_SIZE).set(size.page_tokens)
        metrics.gauge(catalog.CONTEXT_LEN).set(size.context_tokens)
        tokens_max = size.pages_total * size.page_tokens
        metrics.gauge(catalog.MAX_TOTAL_NUM_TOKENS).set(tokens_max)

    def observe(self, report: StepReport, output_tokens: int) -> None:
        """Count a turn of the loop, which generated `output_tokens` tokens; see `flush`."""
        self._last = report
        if report.rows:
            self._seconds.append((report.seconds, report.prefill_rows > 0))
            self._computed_tokens += report.tokens
            self._prefill_tokens += report.prefill_tokens
            self._cached_tokens += report.cached_tokens
        self._output_tokens += output_tokens
        if len(self._seconds) >= SECONDS_MAX:
            self.flush()

    def flush(self) -> None:
        """Write the counts to the metrics, before they are read."""
        report = self._last
        if report is None:
            return
        for seconds, prefill in self._seconds:
            self._step_seconds.observe(seconds)
            (self._extend_s if prefill else self._decode_s).inc(seconds)
        self._seconds.clear()
        self._computed.inc(self._computed_tokens)
        self._decoded.inc(self._output_tokens)
        self._prefilled.inc(self._prefill_tokens)
        self._cached.inc(self._cached_tokens)
        self._computed_tokens = self._output_tokens = 0
        self._prefill_tokens = self._cached_tokens = 0
        self._retractions.inc(report.retractions - self._retractions_seen)
        self._retractions_seen = report.retractions
        self._count_retracted(report)
        self._preemptions.inc(report.preemptions - self._preemptions_seen)
        self._preemptions_seen = report.preemptions
        self._failures.inc(report.failures - self._failures_seen)
        self._failures_seen = report.failures
        self._evicted.inc(report.evicted_tokens - self._evicted_seen)
        self._evicted_seen = report.evicted_tokens
        self._show(report)
        self._show_pools(report.credit)

    def _count_retracted(self, report: StepReport) -> None:
        prompts = report.retracted_prompt_tokens - self._retracted_prompts_seen
        tokens = report.retracted_tokens - self._retracted_tokens_seen
        self._retracted_prompts_seen = report.retracted_prompt_tokens
        self._retracted_tokens_seen = report.retracted_tokens
        self._retracted_input.inc(prompts)
        self._retracted_output.inc(tokens - prompts)

    def show_load_stats(self, stats: WorkerStats) -> None:
        """Set the gauges of the load statistics."""
        self._throughput.set(stats.output_tokens_s)
        prompts = stats.prompt_tokens
        self._hit_rate.set(stats.cached_tokens / prompts if prompts else 0.0)
        self._weight_bytes.set(stats.weight_bytes)
        self._cache_bytes.set(stats.cache_bytes)
        self._grammar_queue.set(stats.grammars)
        self._retracted.set(stats.retracted)

    def started(self, *, load_s: float, warm_up_s: float) -> None:
        """Set the startup times."""
        for phase, seconds in (
            ("load", load_s),
            ("warm_up", warm_up_s),
            ("total", load_s + warm_up_s),
        ):
            self._startup.labels(phase).set(seconds)
        self._weight_load.labels("disk").set(load_s)

    def stalled(self) -> None:
        """Count a stall."""
        self._stalls.inc()

    def show_held(self, *, held: int, overrun_tokens: int) -> None:
        """Set the number of held requests, and count tokens sampled beyond a stop string."""
        self._held.set(held)
        self._overrun.inc(overrun_tokens - self._overrun_seen)
        self._overrun_seen = overrun_tokens

    def _show_pools(self, credit: Capacity) -> None:
        """Set the gauges of sliding windows and states, for a model that has any."""
        if credit.window is not None:
            if self._window is None:
                self._window = PoolGauges(self._metrics, _SWA, self._size.page_tokens)
            self._window.show(credit.window)
        if credit.states is not None:
            if self._states is None:
                self._states = PoolGauges(self._metrics, _MAMBA, 1)
            self._states.show(credit.states)

    def _show(self, report: StepReport) -> None:
        capacity, credit = self._size, report.credit
        used = capacity.pages_total - credit.pages_free - credit.pages_evictable
        self._paused.set(report.paused)
        self._rows.set(report.rows)
        self._running.set(report.running)
        self._sequences.set(credit.sequence_tokens)
        self._waiting.set(report.waiting)
        self._paused_reqs.set(report.waiting if report.paused else 0)
        self._slots_free.set(credit.slots_free)
        self._used_tokens.set(used * capacity.page_tokens)
        self._evictable_tokens.set(credit.pages_evictable * capacity.page_tokens)
        self._available_tokens.set(credit.pages_free * capacity.page_tokens)
        self._token_usage.set(used / capacity.pages_total if capacity.pages_total else 0.0)
        most = capacity.running_max
        self._utilization.set(report.running / most if most else 0.0)
        self._ratio.set(report.new_token_ratio)
