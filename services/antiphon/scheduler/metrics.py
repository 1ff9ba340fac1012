"""Metrics of a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.telemetry import catalog

if TYPE_CHECKING:
    from antiphon.scheduler.actions import RequestBound
    from antiphon.scheduler.worker_caches import WorkerCaches
    from antiphon.telemetry.metrics import Metrics


class SchedulerMetrics:
    """Metrics of the queue, the workers' capacity and the known prefix caches."""

    def __init__(self, metrics: Metrics) -> None:
        self.leads = metrics.gauge(catalog.SCHEDULER_LEADERS)
        self.waiting = metrics.gauge(catalog.NUM_QUEUE_REQS)
        self.open_requests = metrics.gauge(catalog.SCHEDULER_REQS)
        self.wait_seconds = metrics.histogram(catalog.QUEUE_TIME)
        self.bound = metrics.counter(catalog.SCHEDULED_REQS)
        self.returned = metrics.counter(catalog.REQUEUED_REQS)
        self._blocks = metrics.counter(catalog.PROMPT_BLOCKS)
        self._cached_blocks = metrics.counter(catalog.CACHED_PROMPT_BLOCKS)
        self._known_blocks = metrics.gauge(catalog.KNOWN_BLOCKS)
        self._replays = metrics.counter(catalog.KV_REPLAYS)
        self._replays_seen = 0
        self.failed = metrics.counter(catalog.FAILED_TERMS)
        self.refused = metrics.counter(catalog.SCHEDULER_REJECTED_REQS)
        self.lost = metrics.counter(catalog.LOST_REQS)
        self.credit = metrics.gauge(catalog.WORKER_CAPACITY)

    def place(self, bound: RequestBound) -> None:
        """Count the prompt blocks of a bound request."""
        self._blocks.inc(bound.blocks)
        self._cached_blocks.inc(bound.cached_blocks)

    def follow(self, caches: WorkerCaches) -> None:
        """Update the gauges of the known prefix caches."""
        self._known_blocks.set(caches.blocks)
        self._replays.inc(caches.replays - self._replays_seen)
        self._replays_seen = caches.replays
