"""Reloads the keys file when it changes; an invalid file is ignored."""

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
"""Polling interval. The whole file is compared: timestamps of files are too coarse."""


class KeysFile:
    """The keys file, and its last content."""

    def __init__(self, file: str) -> None:
        self._path = Path(file).expanduser()
        self._seen: bytes | str | None = None
        """The last content, or why it could not be read."""

    def read(self) -> Tenants:
        """Read the file for the first time.

        Raises:
            ConfigError: It cannot be read or is invalid.
        """
        self._seen = keys_file_bytes(self._path)
        return tenants_of(self._seen, self._path)

    def reload_if_changed(self) -> Tenants | ConfigError | None:
        """Return the new content, or what is wrong with it; None if it is unchanged."""
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
        """Apply the file whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            news = await asyncio.to_thread(self.reload_if_changed)
            if isinstance(news, Tenants):
                access.reload(news)
                metrics.add_tenants(access.names)
                metrics.keys_read.labels("read").inc()
                log.info("keys file reloaded", extra={"tenants": len(news.tenants)})
            elif news is not None:
                metrics.keys_read.labels("refused").inc()
                log.error("keys file not reloaded", extra={"reason": str(news)})
