"""The worker's numbers for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SECONDS_MAX = 4096
"""Steps whose times wait for somebody to read them."""


class WorkerMetrics:
    """What the batching loop did, and how full the worker is."""

    def __init__(self, registry: CollectorRegistry, pages_total: int) -> None:
        self._pages_total = pages_total
        self._last: StepReport | None = None
        self._seconds: list[float] = []
        self._computed_tokens = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._output_tokens = 0
        self._retractions_seen = self._preemptions_seen = self._failures_seen = 0

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
        self._prompts = counter("prompt_tokens", "Tokens of the prompts that were begun.")
        self._cached = counter("cached_tokens", "Of those, what the prefix cache had.")
        self._retractions = counter("retractions", "Choices that had to start over.")
        self._preemptions = counter("preemptions", "Choices that gave way to a higher priority.")
        self._failures = counter("plan_failures", "Steps that raised, repetitions included.")
        self._stalls = counter("stalls", "Times that the batching loop stood still.")
        self.refused = Counter(
            "antiphon_worker_commands_refused",
            "Batches of commands that were not obeyed.",
            ("reason",),
            registry=registry,
        )
        self._paused = gauge("paused", "1 while no steps are run.")
        self._overrun = gauge("overrun_tokens", "Tokens made beyond a stop string, since start.")
        self._returned = gauge("returned", "Requests given back unstarted, since start.")
        self._rows = gauge("batch_rows", "Choices in the last step.")
        self._running = gauge("running", "Choices with pages.")
        self._waiting = gauge("waiting", "Choices that wait for pages.")
        self._slots_free = gauge("slots_free", "Choices that could have pages beside those.")
        self._pages_used = gauge("pages_used", "Pages that requests have.")
        self._pages_cached = gauge("pages_cached", "Pages that only the prefix cache has.")
        self._held = gauge("held", "Requests whose ids are kept for a replay.")

    def observe(self, report: StepReport, output_tokens: int) -> None:
        """Take note of a turn of the loop, which told so many tokens; `settle` does the rest."""
        self._last = report
        if report.rows:
            self._seconds.append(report.seconds)
            self._computed_tokens += report.tokens
            self._prompt_tokens += report.prompt_tokens
            self._cached_tokens += report.cached_tokens
        self._output_tokens += output_tokens
        if len(self._seconds) >= SECONDS_MAX:
            self.settle()

    def settle(self) -> None:
        """Show what was noted: somebody reads it."""
        report = self._last
        if report is None:
            return
        for seconds in self._seconds:
            self._step_seconds.observe(seconds)
        self._seconds.clear()
        self._computed.inc(self._computed_tokens)
        self._output.inc(self._output_tokens)
        self._prompts.inc(self._prompt_tokens)
        self._cached.inc(self._cached_tokens)
        self._computed_tokens = self._output_tokens = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._retractions.inc(report.retractions - self._retractions_seen)
        self._retractions_seen = report.retractions
        self._preemptions.inc(report.preemptions - self._preemptions_seen)
        self._preemptions_seen = report.preemptions
        self._failures.inc(report.failures - self._failures_seen)
        self._failures_seen = report.failures
        self._paused.set(report.paused)
        self._rows.set(report.rows)
        self._running.set(report.running)
        self._waiting.set(report.waiting)
        self._slots_free.set(report.credit.slots_free)
        held = report.credit.pages_evictable
        self._pages_used.set(self._pages_total - report.credit.pages_free - held)
        self._pages_cached.set(held)

    def stalled(self) -> None:
        """Count a standstill."""
        self._stalls.inc()

    def hold(self, *, held: int, overrun_tokens: int, returned: int) -> None:
        """Say what is kept, and what was made in vain or given back since start."""
        self._held.set(held)
        self._overrun.set(overrun_tokens)
        self._returned.set(returned)
