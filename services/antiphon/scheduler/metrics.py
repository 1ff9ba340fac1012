"""What a scheduler counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from antiphon.scheduler.actions import Bound
    from antiphon.scheduler.caches import Caches

_WAIT_BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)


class SchedulerMetrics:
    """Named `antiphon_scheduler_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leads = Gauge(
            "antiphon_scheduler_leads", "1 on the scheduler that leads.", registry=registry
        )
        self.waiting = Gauge(
            "antiphon_scheduler_waiting", "Requests in the queue.", registry=registry
        )
        self.kept = Gauge(
            "antiphon_scheduler_requests",
            "Requests accepted and not seen to end.",
            registry=registry,
        )
        self.wait_seconds = Histogram(
            "antiphon_scheduler_wait_seconds",
            "Time from the submit to a worker.",
            registry=registry,
            buckets=_WAIT_BUCKETS_S,
        )
        self.bound = Counter(
            "antiphon_scheduler_bound", "Attempts made.", ("worker",), registry=registry
        )
        self.returned = Counter(
            "antiphon_scheduler_returned",
            "Requests that a worker gave back unstarted.",
            ("worker",),
            registry=registry,
        )
        self._blocks = Counter(
            "antiphon_scheduler_prompt_blocks",
            "Blocks of 64 tokens of the prompts that were bound.",
            registry=registry,
        )
        self._cached_blocks = Counter(
            "antiphon_scheduler_prompt_blocks_cached",
            "Of these, those that the worker was known to have.",
            registry=registry,
        )
        self._known_blocks = Gauge(
            "antiphon_scheduler_known_blocks",
            "Blocks in the workers' caches that are known here.",
            registry=registry,
        )
        self._replays = Counter(
            "antiphon_scheduler_kv_replays",
            "Replays of KV events asked for.",
            registry=registry,
        )
        self._replays_seen = 0
        self.refused = Counter(
            "antiphon_scheduler_refused", "Submits refused.", ("reason",), registry=registry
        )
        self.lost = Counter(
            "antiphon_scheduler_notices", "Notices of lost requests sent.", registry=registry
        )
        self.credit = Gauge(
            "antiphon_scheduler_credit",
            "Requests that a worker may still be given.",
            ("worker",),
            registry=registry,
        )

    def place(self, bound: Bound) -> None:
        """A request has got its worker."""
        self._blocks.inc(bound.blocks)
        self._cached_blocks.inc(bound.cached_blocks)

    def follow(self, caches: Caches) -> None:
        """Show how much is known of the workers' caches."""
        self._known_blocks.set(caches.blocks)
        self._replays.inc(caches.replays - self._replays_seen)
        self._replays_seen = caches.replays
