"""The state of a connection, as every transport keeps it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class LinkState:
    """Whether a transport reaches its broker, and who wants to know. Implements `Link`.

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
        """How often the connection was made."""
        return self._connect_count

    def on_connect(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await `call` at each join from now on."""
        self._on_connect.append(call)

    def on_disconnect(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the link drops."""
        self._on_disconnect.append(call)

    async def mark_connected(self) -> None:
        """Say that the broker is reached and subscriptions are in place. For the transport only."""
        self._connect_count += 1
        self.up = True
        for call in self._on_connect:
            try:
                await call()
            except EngineError as error:
                log.warning("join callback refused", extra={"code": error.code})
            except Exception:
                # A join must not fail for what somebody does with it.
                log.exception("join callback failed")

    def mark_disconnected(self) -> None:
        """Say that the broker is gone. For the transport only; a second drop says nothing."""
        if self.up:
            self.up = False
            for call in self._on_disconnect:
                call()
