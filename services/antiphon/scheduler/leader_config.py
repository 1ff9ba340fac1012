"""Timeouts, limits and settings of a leader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from antiphon.config.worker import Policy
from antiphon.service.priority import PriorityPolicy

if TYPE_CHECKING:
    from antiphon.config.settings import Settings

ELECTION_TIMEOUT_BEATS = 2
"""A scheduler claims a term after so many heartbeats without a leader."""
UNECHOED_BEATS = 2
"""So long after its own heartbeats have stopped coming back, a leader makes way for a standby."""
READY_TIMEOUT_BEATS = 2
"""How long a new leader waits for gateways and workers to report before it binds or aborts."""
GRACE_BEATS = 3
"""How long two views may differ before the leader acts: most differences are in transit."""
UNHELD_BEATS = 2
"""How long a request of another leader may be missing in reports: one may have been under way."""
ADOPTION_BEATS = 12
"""How long a gateway may ask for a request that has been given to it: an answer may be lost."""
SEAL_TIMEOUT_BEATS = 3
"""How long detokenizers may take to seal a request; then its owner does."""
ATTEMPT_TIMEOUT_BEATS = 20
"""An attempt has failed after so many heartbeats without a worker or a detokenizer for it."""
FREE_AFTER_MS = 2_000
"""How long past its deadline a request is freed here. Its gateway has closed it by then."""
MIGRATIONS_MAX = 3
"""How often a request migrates at most."""
DEATHS_MAX = 2
"""So many workers may have died while they computed a request; then it runs alone at first, since
it may be what killed them, and ends if its worker dies again."""
ALONE_STEPS = 8
"""How many tokens a choice of such a request gets before its worker takes other requests."""

RESTART_PAUSE_BEATS = 2
"""How long a scheduler stands by after a failed term; doubled after each further one."""
RESTART_PAUSE_MAX_S = 30.0
SOUND_TERM_S = 60.0
"""A term that lasted this long resets the count of failures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderConfig:
    """The settings that a leader reads."""

    beat_s: float = 0.5
    dead_beats: int = 5
    queue_max: int = 1024
    queue_timeout_s: float | None = None
    precedence: PriorityPolicy = field(default_factory=PriorityPolicy)
    policy: Policy = Policy.FCFS
    look_ahead: int = 2
    waiting_max: int = 256
    tombstone_s: float = 10.0
    stall_s: float = 30.0
    payload_bytes_max: int = 1024 * 1024
    prefill_weight: float = 1.0
    request_blocks: float = 4.0
    blocks_max: int = 500_000
    output_bytes_max: int = 8 * 1024**3
    tenant_output_bytes_max: int = 4 * 1024**3

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            beat_s=settings.service.heartbeat_s,
            dead_beats=settings.scheduler.dead_beats,
            queue_max=settings.scheduler.queue_max,
            queue_timeout_s=settings.queue.timeout_s,
            precedence=PriorityPolicy.from_config(settings.queue),
            policy=settings.queue.policy,
            look_ahead=settings.scheduler.look_ahead,
            waiting_max=settings.queue.waiting_max,
            tombstone_s=settings.scheduler.tombstone_s,
            stall_s=settings.batching.stall_s,
            payload_bytes_max=settings.bus.payload_bytes_max,
            prefill_weight=settings.scheduler.prefill_weight,
            request_blocks=settings.scheduler.request_blocks,
            blocks_max=settings.scheduler.blocks_max,
            output_bytes_max=settings.detokenizer.output_bytes_max,
            tenant_output_bytes_max=settings.scheduler.tenant_output_bytes_max,
        )

    def beats(self, count: int) -> float:
        return count * self.beat_s
