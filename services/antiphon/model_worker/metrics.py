"""The worker's numbers for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_ID_BYTES = 4


class WorkerMetrics:
    """What the batching loop did, and how full the worker is."""

    def __init__(self, registry: CollectorRegistry, pages_total: int) -> None:
        self._pages_total = pages_total
        self._retractions_seen = 0

        def counter(name: str, meaning: str) -> Counter:
            return Counter(f"antiphon_worker_{name}", meaning, registry=registry)

        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"antiphon_worker_{name}", meaning, registry=registry)

        self._step_seconds = Histogram(
            "antiphon_worker_step_seconds",
            "Time of one forward pass with its sampling.",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._computed = counter("computed_tokens", "Tokens computed, prompts included.")
        self._output = counter("output_tokens", "Tokens of answers.")
        self._retractions = counter("retractions", "Choices that had to start over.")
        self._overrun = gauge("overrun_tokens", "Tokens made beyond a stop string, since start.")
        self._rows = gauge("batch_rows", "Choices in the last step.")
        self._running = gauge("running", "Choices with pages.")
        self._waiting = gauge("waiting", "Choices that wait for pages.")
        self._pages_used = gauge("pages_used", "Pages in use.")
        self._held = gauge("held", "Requests whose ids are kept for a replay.")

    def observe(self, report: StepReport) -> None:
        """Count a turn of the loop."""
        if report.rows:
            self._step_seconds.observe(report.seconds)
            self._computed.inc(report.tokens)
        self._output.inc(sum(len(news.token_ids) for news in report.progress) // _ID_BYTES)
        self._retractions.inc(report.retractions - self._retractions_seen)
        self._retractions_seen = report.retractions
        self._rows.set(report.rows)
        self._running.set(report.running)
        self._waiting.set(report.waiting)
        self._pages_used.set(self._pages_total - report.pages_free)

    def hold(self, *, held: int, overrun_tokens: int) -> None:
        """Say what is kept, and what was made in vain since start."""
        self._held.set(held)
        self._overrun.set(overrun_tokens)
