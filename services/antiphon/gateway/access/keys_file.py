"""The keys file while the gateway runs: read again when it changes, kept as it was if it is bad."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.tenants import Tenants, keys_file_bytes, tenants_of

if TYPE_CHECKING:
    from antiphon.gateway.access.access import Access
    from antiphon.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Pause between looks. The whole file is compared: times of files are too coarse to go by."""


class KeysFile:
    """A file, and what it said the last time."""

    def __init__(self, file: str) -> None:
        self._path = Path(file).expanduser()
        self._seen: bytes | str | None = None
        """What it held, or why it could not be read."""

    def read(self) -> Tenants:
        """Read it for the first time.

        Raises:
            ConfigError: It cannot be read or used.
        """
        self._seen = keys_file_bytes(self._path)
        return tenants_of(self._seen, self._path)

    def reload_if_changed(self) -> Tenants | ConfigError | None:
        """Return what it says now, or what is wrong with it; None: nothing has changed."""
        seen: bytes | str
        try:
            seen = data = keys_file_bytes(self._path)
        except ConfigError as error:
            seen, data = str(error), None
        if seen == self._seen:
            return None
        self._seen = seen
        if data is None:
            return ConfigError(seen)
        try:
            return tenants_of(data, self._path)
        except ConfigError as error:
            return error

    async def follow(self, access: Access, metrics: GatewayMetrics) -> None:
        """Renew the access whenever the file changes, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            news = await asyncio.to_thread(self.reload_if_changed)
            if isinstance(news, Tenants):
                access.reload(news)
                metrics.add_tenants(access.names)
                metrics.keys_read.labels("read").inc()
                log.info("keys read again", extra={"tenants": len(news.tenants)})
            elif news is not None:
                metrics.keys_read.labels("refused").inc()
                log.error("keys kept as they were", extra={"reason": str(news)})
