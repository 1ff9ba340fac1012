"""Detects dead gateways, whose unfinished work another gateway then ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Process

SETTLE_S = 10.0
"""Grace period for a gateway that just started, or whose end is in flight."""


class GatewayLiveness:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began_at = runtime.clock.now()

    def is_abandoned(self, owner: Process, deadline_unix_ms: int) -> bool:
        """Whether the owner of some work is dead, or its deadline has passed."""
        runtime = self._runtime
        due_ms = runtime.peers.to_local_ms(deadline_unix_ms, owner)
        if runtime.clock.unix_ms() > due_ms + round(SETTLE_S * 1000):
            return True
        if owner == runtime.process or runtime.peers.is_alive(owner):
            return False
        return runtime.clock.now() > self._began_at + SETTLE_S
