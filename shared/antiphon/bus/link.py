"""State of a connection, shared by all transports."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class LinkState:
    """Whether a transport reaches its broker, with callbacks on changes. Implements `Link`.

    Attributes:
        up: Whether the broker is reachable now.
    """

    def __init__(self) -> None:
        self.up = False
        self._connect_count = 0
        self._on_connect: list[Callable[[], Awaitable[None]]] = []
        self._on_disconnect: list[Callable[[], None]] = []

    @property
    def connect_count(self) -> int:
        """Number of times the connection was established."""
        return self._connect_count

    def on_connect(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await `call` at each connect and reconnect from now on."""
        self._on_connect.append(call)

    def on_disconnect(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the link drops."""
        self._on_disconnect.append(call)

    async def mark_connected(self) -> None:
        """Mark the link as up, with subscriptions in place. For the transport only."""
        self._connect_count += 1
        self.up = True
        for call in self._on_connect:
            try:
                await call()
            except EngineError as error:
                log.warning("join callback refused", extra={"code": error.code})
            except Exception:
                # A failing callback must not break the connection.
                log.exception("join callback failed")

    def mark_disconnected(self) -> None:
        """Mark the link as down. For the transport only; idempotent."""
        if self.up:
            self.up = False
            for call in self._on_disconnect:
                call()
