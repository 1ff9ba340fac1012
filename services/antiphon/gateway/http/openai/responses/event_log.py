"""Stored events of a background response, which any gateway can stream."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from antiphon.gateway.http.core.keepalive import HEADERS_S, PING_S
from antiphon.gateway.http.core.writer import PING
from antiphon.gateway.http.openai.responses.events import (
    Completed,
    Failed,
    Incomplete,
    encode_event,
)
from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.bus.store import KeyValueStore
    from antiphon.gateway.http.openai.responses.store import ResponseStore
    from antiphon.service.clock import Clock
    from antiphon.wire.ids import TenantId

log = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 0.1
"""Events of this period are stored together: one message per step would be thousands."""
_LOOK_S = 0.05
_CHECK_AFTER_S = 1.0
"""After this time without events, the reader checks whether more will come."""
_ENDS = tuple(
    f"event: {kind.__struct_config__.tag}\n".encode() for kind in (Completed, Incomplete, Failed)
)
_PIECES, _ALL = "events", "told"  # keys of stored values, which stay


class ResponseEventLog:
    """The events of one response. The gateway that generates it writes; any gateway reads.

    Numbered pieces are stored one after another. After the last one they are replaced by one value
    with all events.
    """

    def __init__(
        self, store: KeyValueStore, clock: Clock, tenant: TenantId, response_id: str
    ) -> None:
        self._store = store
        self._clock = clock
        self._key = (tenant, response_id)
        self._written: list[bytes] = []
        self._buffered: list[bytes] = []
        self._buffered_at = clock.now()

    async def write(self, data: bytes) -> None:
        """Store more events, now or with the next ones; the last event closes the log.

        Events that cannot be stored are lost for readers; the response itself is stored separately.
        """
        self._buffered.append(data)
        now, last = self._clock.now(), _last_of(_split(data))
        if not last and self._written and now < self._buffered_at + _FLUSH_INTERVAL_S:
            return
        piece = b"".join(self._buffered)
        self._buffered, self._buffered_at = [], now
        try:
            await self._store.put(*self._key, _PIECES, str(len(self._written)), value=piece)
            self._written.append(piece)
            if last:
                await self._store.put(*self._key, _ALL, value=b"".join(self._written))
                await self._store.forget(*self._key, _PIECES)
        except EngineError as error:
            self._buffered = [piece]
            log.warning("events not stored", extra={"id": self._key[1], "code": error.code})

    async def read(self, records: ResponseStore, after: int) -> AsyncGenerator[bytes]:
        """Yield the events after a sequence number (-1: all) until the last, with pings in between.

        Raises:
            EngineError: They cannot be read now; retry after the last event that was read.
        """
        number = piece = 0
        waits_since = self._clock.now()
        ping_at = waits_since + HEADERS_S
        while True:
            found = await self._next(piece)
            if found is None and self._clock.now() >= ping_at:
                yield PING
                ping_at = self._clock.now() + PING_S
            if found is None:
                if self._clock.now() < waits_since + _CHECK_AFTER_S:
                    await asyncio.sleep(_LOOK_S)
                    continue
                record = await records.get(*self._key)
                if record.response.ended and await self._next(piece) is None:
                    kind = Completed if record.response.status == "completed" else Failed
                    yield encode_event(kind(sequence_number=number, response=record.response))
                    return
                waits_since = self._clock.now()
                continue
            complete, events = found
            first = 0 if complete else number
            fresh = events[max(number, after + 1) - first :]
            number, piece = first + len(events), piece + 1
            waits_since = self._clock.now()
            if fresh:
                yield b"".join(fresh)
                ping_at = self._clock.now() + PING_S
            if _last_of(events):
                return

    async def _next(self, piece: int) -> tuple[bool, list[bytes]] | None:
        """Return the next piece, or the complete value, and which it is; None without either."""
        data = await self._store.get(*self._key, _PIECES, str(piece))
        if data is not None:
            return False, _split(data)
        data = await self._store.get(*self._key, _ALL)
        return None if data is None else (True, _split(data))


def _split(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]


def _last_of(events: list[bytes]) -> bool:
    return bool(events) and events[-1].startswith(_ENDS)
