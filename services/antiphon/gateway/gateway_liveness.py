"""Which gateways are gone: what they had begun is ended by whoever looks at it next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Process

SETTLE_S = 10.0
"""How long a gateway that has just started, or an end under way, is waited for."""


class GatewayLiveness:
    """Every gateway, as this one hears of them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began_at = runtime.clock.now()

    def is_abandoned(self, owner: Process, deadline_unix_ms: int) -> bool:
        """Whether who has begun something is dead, or has had all the time there was for it."""
        runtime = self._runtime
        due_ms = runtime.peers.to_local_ms(deadline_unix_ms, owner)
        if runtime.clock.unix_ms() > due_ms + round(SETTLE_S * 1000):
            return True
        if owner == runtime.process or runtime.peers.is_alive(owner):
            return False
        return runtime.clock.now() > self._began_at + SETTLE_S
