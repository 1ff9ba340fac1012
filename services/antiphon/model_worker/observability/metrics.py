"""The worker's Prometheus metrics."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from antiphon.kernels.cpu import extension
from antiphon.telemetry import catalog
from antiphon.telemetry.metrics import Metrics, RunningTotal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Gauge

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.page_budget import PoolUse
    from antiphon.model_worker.batching.state import CoreTotals
    from antiphon.telemetry.catalog import MetricSpec
    from antiphon.wire.heartbeat import WorkerStats


SECONDS_MAX = 4096
"""Maximum number of step times that are stored until the next scrape."""


class WorkerSize(msgspec.Struct, frozen=True, kw_only=True):
    pages_total: int
    page_tokens: int = 1
    running_max: int = 0
    context_tokens: int = 0
    captured: frozenset[int] = frozenset()  # rows of decode steps that are replayed
    captured_tokens: int = 0  # of the largest prefill that is replayed

    def replays(self, report: StepReport) -> bool:
        """Whether the step was captured at start, whole or in pieces."""
        whole = not report.prefill_rows and report.rows in self.captured
        return whole or 0 < report.tokens <= self.captured_tokens

    def used_pages(self, report: StepReport) -> int:
        """Pages that requests hold."""
        return self.pages_total - report.capacity.pages_free - report.capacity.pages_evictable

    def usage(self, report: StepReport) -> float:
        return _share(self.used_pages(report), self.pages_total)


_TOTALS: tuple[tuple[MetricSpec, Callable[[CoreTotals], int]], ...] = (
    (catalog.NUM_RETRACTIONS, lambda totals: totals.retractions),
    (catalog.RETRACTED_INPUT_TOKENS, lambda totals: totals.retracted_prompt_tokens),
    (
        catalog.RETRACTED_OUTPUT_TOKENS,
        lambda totals: totals.retracted_tokens - totals.retracted_prompt_tokens,
    ),
    (catalog.NUM_PREEMPTIONS, lambda totals: totals.preemptions),
    (catalog.EVICTED_TOKENS, lambda totals: totals.evicted_tokens),
)
_GAUGES: tuple[tuple[MetricSpec, Callable[[StepReport, WorkerSize], float]], ...] = (
    (catalog.PAUSED_WORKERS, lambda report, _: report.paused),
    (catalog.BATCH_SIZE, lambda report, _: report.rows),
    (catalog.NUM_RUNNING_REQS, lambda report, _: report.totals.running),
    (catalog.DECODE_SUM_SEQ_LENS, lambda report, _: report.capacity.sequence_tokens),
    (catalog.NUM_QUEUE_REQS, lambda report, _: report.totals.waiting),
    (catalog.NUM_PAUSED_REQS, lambda report, _: report.totals.waiting if report.paused else 0),
    (catalog.FREE_SLOTS, lambda report, _: report.capacity.slots_free),
    (catalog.KV_USED_TOKENS, lambda report, size: size.used_pages(report) * size.page_tokens),
    (
        catalog.KV_EVICTABLE_TOKENS,
        lambda report, size: report.capacity.pages_evictable * size.page_tokens,
    ),
    (
        catalog.KV_AVAILABLE_TOKENS,
        lambda report, size: report.capacity.pages_free * size.page_tokens,
    ),
    (catalog.TOKEN_USAGE, lambda report, size: size.usage(report)),
    (catalog.UTILIZATION, lambda report, size: _share(report.totals.running, size.running_max)),
    (catalog.NEW_TOKEN_RATIO, lambda report, _: report.totals.new_token_ratio),
    (
        catalog.SPEC_ACCEPT_LENGTH,
        lambda report, _: _accept_length(report.totals),
    ),
    (
        catalog.SPEC_ACCEPT_RATE,
        lambda report, _: _share(report.totals.drafts_accepted, report.totals.drafts_proposed),
    ),
)
_LOAD_GAUGES: tuple[tuple[MetricSpec, Callable[[WorkerStats], float]], ...] = (
    (catalog.GEN_THROUGHPUT, lambda stats: stats.output_tokens_s),
    (catalog.CACHE_HIT_RATE, lambda stats: _share(stats.cached_tokens, stats.prompt_tokens)),
    (catalog.WEIGHT_BYTES, lambda stats: stats.weight_bytes),
    (catalog.KV_CACHE_BYTES, lambda stats: stats.cache_bytes),
    (catalog.NUM_GRAMMAR_QUEUE_REQS, lambda stats: stats.grammars),
    (catalog.NUM_RETRACTED_REQS, lambda stats: stats.retracted),
)
# Of a kind of cache: free, evictable and used, the used share, and the total where there is one.
_SWA = (
    catalog.SWA_AVAILABLE_TOKENS,
    catalog.SWA_EVICTABLE_TOKENS,
    catalog.SWA_USED_TOKENS,
    catalog.SWA_TOKEN_USAGE,
    catalog.MAX_TOTAL_NUM_TOKENS_SWA,
)
_MAMBA = (catalog.MAMBA_AVAILABLE, catalog.MAMBA_EVICTABLE, catalog.MAMBA_USED, catalog.MAMBA_USAGE)


class WorkerMetrics:
    """Metrics of the batching loop and of the worker's load."""

    def __init__(self, metrics: Metrics, size: WorkerSize) -> None:
        self._metrics = metrics
        self._size = size
        self._last: StepReport | None = None
        self._seconds: list[tuple[float, bool]] = []
        self._tokens = {"computed": 0, "prefill_compute": 0, "prefill_cache": 0, "decode": 0}
        self._step_seconds = metrics.histogram(catalog.STEP_SECONDS)
        forward = metrics.counter(catalog.FORWARD_SECONDS)
        self._extend_s, self._decode_s = forward.labels("extend"), forward.labels("decode")
        realtime = metrics.counter(catalog.REALTIME_TOKENS)
        self._token_totals = {
            kind: RunningTotal(realtime.labels(kind))
            for kind in ("prefill_compute", "prefill_cache", "decode")
        }
        self._token_totals["computed"] = RunningTotal(metrics.counter(catalog.COMPUTED_TOKENS))
        self._totals = [(RunningTotal(metrics.counter(spec)), read) for spec, read in _TOTALS]
        self._failures = RunningTotal(metrics.counter(catalog.FAILED_STEPS))
        self._gauges = [(metrics.gauge(spec), read) for spec, read in _GAUGES]
        self._load_gauges = [(metrics.gauge(spec), read) for spec, read in _LOAD_GAUGES]
        self._pools: dict[tuple[MetricSpec, ...], list[Gauge]] = {}
        self.refused = metrics.counter(catalog.REFUSED_COMMANDS)
        self.stalls = metrics.counter(catalog.STALLS)
        self._overrun = RunningTotal(metrics.counter(catalog.OVERRUN_TOKENS))
        self._held = metrics.gauge(catalog.HELD_REQS)
        self._weight_load = metrics.gauge(catalog.WEIGHT_LOAD_SECONDS)
        self._startup = metrics.gauge(catalog.STARTUP_SECONDS)
        metrics.gauge(catalog.NUM_PAGES).set(size.pages_total)
        metrics.gauge(catalog.PAGE_SIZE).set(size.page_tokens)
        metrics.gauge(catalog.CONTEXT_LEN).set(size.context_tokens)
        tokens_max = size.pages_total * size.page_tokens
        metrics.gauge(catalog.MAX_TOTAL_NUM_TOKENS).set(tokens_max)

    def observe(self, report: StepReport, output_tokens: int) -> None:
        """Count a turn of the loop, which generated `output_tokens` tokens; see `flush`."""
        self._last, tokens = report, self._tokens
        if report.rows:
            self._seconds.append((report.seconds, report.prefill_rows > 0))
            tokens["computed"] += report.tokens
            tokens["prefill_compute"] += report.prefill_tokens
            tokens["prefill_cache"] += report.cached_tokens
        tokens["decode"] += output_tokens
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
        for kind, count in self._tokens.items():
            self._token_totals[kind].follow(count)
        for total, read in self._totals:
            total.follow(read(report.totals))
        self._failures.follow(report.failures)
        for gauge, value in self._gauges:
            gauge.set(value(report, self._size))
        self._show_pool(_SWA, report.capacity.window, self._size.page_tokens)
        self._show_pool(_MAMBA, report.capacity.states, 1)

    def show_load_stats(self, stats: WorkerStats) -> None:
        for gauge, read in self._load_gauges:
            gauge.set(read(stats))

    def started(self, *, load_s: float, warm_up_s: float) -> None:
        phases = {"load": load_s, "warm_up": warm_up_s, "total": load_s + warm_up_s}
        for phase, seconds in phases.items():
            self._startup.labels(phase).set(seconds)
        self._weight_load.labels("disk").set(load_s)

    def show_held(self, *, held: int, overrun_tokens: int) -> None:
        """Tokens sampled beyond a stop string are `overrun_tokens`."""
        self._held.set(held)
        self._overrun.follow(overrun_tokens)

    def _show_pool(
        self, families: tuple[MetricSpec, ...], use: PoolUse | None, page_tokens: int
    ) -> None:
        """Show sliding windows or states of a model that has any; others have no such metrics."""
        if use is None:
            return
        if families not in self._pools:
            self._pools[families] = [self._metrics.gauge(family) for family in families]
        values = (
            use.free * page_tokens,
            use.evictable * page_tokens,
            use.used * page_tokens,
            _share(use.used, use.total),
            use.total * page_tokens,
        )
        for gauge, value in zip(self._pools[families], values, strict=False):
            gauge.set(value)


def _accept_length(totals: CoreTotals) -> float:
    """Tokens that a verify row yields on average."""
    return _share(totals.drafts_accepted + totals.verify_rows, totals.verify_rows)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class CpuTime(Collector):
    """Reads the CPU time of the worker's threads when it is scraped; free of cost otherwise.

    `bus` is the thread that creates this, which handles the bus: heartbeats, commands, and all
    results of steps but tokens. `sending` is the time that the batching loop's thread spends on
    sending tokens (`sending_s`), `kernels` the time in kernels, and `python` the rest of the
    `batching` threads: the loop's, and that of the forward passes if they have one. These alone
    call kernels once the model is loaded. The other threads of torch's pool compute beside them,
    each about as long as `kernels`.
    """

    def __init__(
        self, batching: Callable[[], Iterable[int]], sending_s: Callable[[], float]
    ) -> None:
        self._bus = threading.get_native_id()
        self._batching = batching
        self._sending_s = sending_s

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "antiphon_worker_cpu_seconds",
            "Processor time by part: bus; and of the batching threads kernels, python and sending.",
            labels=["part"],
        )
        sending = self._sending_s()
        bus, threads = _thread_s(self._bus), map(_thread_s, self._batching())
        batching = sum(seconds for seconds in threads if seconds is not None)
        if bus is not None:
            family.add_metric(["bus"], bus)
        if batching:
            kernels = min(extension.kernel_cpu_s(), batching)
            family.add_metric(["kernels"], kernels)
            family.add_metric(["sending"], sending)
            family.add_metric(["python"], max(0.0, batching - kernels - sending))
        yield family


def _thread_s(thread: int) -> float | None:
    """A thread's CPU time by Linux's schedstat; None if it has ended, or on other systems.

    Reading the thread's clock instead is undefined for a thread that has just ended.
    """
    try:
        schedstat = Path(f"/proc/self/task/{thread}/schedstat").read_text()
    except OSError:
        return None
    return int(schedstat.split()[0]) * 1e-9
