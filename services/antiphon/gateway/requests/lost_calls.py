"""Whether a call to a queue of services may have got lost with the one that took it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.service.peers import Liveness, PeerChange
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from antiphon.service.peers import Peer
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Role

STALE_S = 30.0
"""How long a broker may give calls to who has fallen silent: as long as it takes to find out."""


class LostCalls:
    """Watches the processes of a role. Nobody knows which one took a call, so each counts."""

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
        """Processes that take work."""
        return len(self._peers.accepting_work(self._role))

    def may_be_lost(self, asked_at: float) -> bool:
        """Whether a call that was made then may have gone to one that is silent or gone.

        While none is alive, those that are silent are as likely busy, and there is no other to
        call; where none is left at all, the broker says so.
        """
        if not self.live_count:
            return False
        silent = any(
            peer.liveness is not Liveness.ALIVE for peer in self._peers.with_role(self._role)
        )
        return silent or asked_at <= self._until

    def _on_peer(self, change: PeerChange, peer: Peer) -> None:
        """Note who died. One that drained had answered its calls."""
        if change is not PeerChange.DIED or peer.heartbeat.role != self._role:
            return
        if peer.heartbeat.state is ProcessState.DRAINING:
            return
        # The earlier life of one that came back took with it what it had, and takes no more.
        came_back = self._peers.age_s(peer) < self._silence_s
        self._until = max(self._until, self._clock.now() + (0.0 if came_back else STALE_S))
