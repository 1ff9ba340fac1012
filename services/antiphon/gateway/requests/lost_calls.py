"""Detects calls to a queue group that may have been lost with the process that received them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.service.peers import Liveness, PeerChange
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from antiphon.service.peers import Peer
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Role

STALE_S = 30.0
"""How long the broker may deliver calls to a dead process: the time to detect its death."""


class LostCalls:
    """Tracks the processes of a role. The receiver of a call is unknown, so every one counts."""

    def __init__(self, runtime: Runtime, role: Role) -> None:
        self._peers = runtime.peers
        self._clock = runtime.clock
        self._role = role
        service, scheduler = runtime.settings.service, runtime.settings.scheduler
        self._silence_s = service.heartbeat_s * scheduler.dead_beats
        self._until = -STALE_S
        self._peers.watch(self._on_peer)

    @property
    def live_count(self) -> int:
        """Number of processes that accept work."""
        return len(self._peers.accepting_work(self._role))

    def may_be_lost(self, called_at: float) -> bool:
        """Whether a call sent at `called_at` may have gone to a process that is stale or gone.

        While no process is alive, stale ones may merely be busy and there is no other to call. If
        no process is left at all, the broker reports it.
        """
        if not self.live_count:
            return False
        silent = any(
            peer.liveness is not Liveness.ALIVE for peer in self._peers.with_role(self._role)
        )
        return silent or called_at <= self._until

    def _on_peer(self, change: PeerChange, peer: Peer) -> None:
        """Record a death. A process that drained has answered its calls."""
        if change is not PeerChange.DIED or peer.heartbeat.role != self._role:
            return
        if peer.heartbeat.state is ProcessState.DRAINING:
            return
        # The previous incarnation of a restarted process lost its calls and receives no more.
        came_back = self._peers.age_s(peer) < self._silence_s
        self._until = max(self._until, self._clock.now() + (0.0 if came_back else STALE_S))
