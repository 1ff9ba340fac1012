"""The events of a response that is made in the background, kept so that any gateway tells them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from antiphon.gateway.http.core.keepalive import HEADERS_S, PING_S
from antiphon.gateway.http.core.sse import PING
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

_GATHER_S = 0.1
"""Events of so long are put by together: a piece for each step would be a thousand messages."""
_LOOK_S = 0.05
_DOUBT_S = 1.0
"""After so long without events it is asked whether more will come."""
_ENDS = tuple(
    f"event: {kind.__struct_config__.tag}\n".encode() for kind in (Completed, Incomplete, Failed)
)
_PIECES, _ALL = "events", "told"


class ResponseEventLog:
    """Of one response. Who makes it writes; whoever asks reads, from any event on.

    Pieces lie one after another under their numbers. Once the last is there they are replaced by
    one value with everything.
    """

    def __init__(
        self, store: KeyValueStore, clock: Clock, tenant: TenantId, response_id: str
    ) -> None:
        self._store = store
        self._clock = clock
        self._key = (tenant, response_id)
        self._written: list[bytes] = []
        self._gathered: list[bytes] = []
        self._gathered_at = clock.now()

    async def write(self, told: bytes) -> None:
        """Put by more events, now or with the next ones; the last event closes it.

        What cannot be put by is lost for who reads the events; the response is kept by itself.
        """
        self._gathered.append(told)
        now, last = self._clock.now(), _last_of(_split(told))
        if not last and self._written and now < self._gathered_at + _GATHER_S:
            return
        piece = b"".join(self._gathered)
        self._gathered, self._gathered_at = [], now
        try:
            await self._store.put(*self._key, _PIECES, str(len(self._written)), value=piece)
            self._written.append(piece)
            if last:
                await self._store.put(*self._key, _ALL, value=b"".join(self._written))
                await self._store.forget(*self._key, _PIECES)
        except EngineError as error:
            self._gathered = [piece]
            log.warning("events not kept", extra={"id": self._key[1], "code": error.code})

    async def read(self, records: ResponseStore, after: int) -> AsyncGenerator[bytes]:
        """Yield the events behind a number, as they come, until the last; pings in between.

        Args:
            records: Says whether more will come.
            after: A sequence number; -1 for all events.

        Raises:
            EngineError: They cannot be read now; ask again from the last that was read.
        """
        number = piece = 0
        waits_since = self._clock.now()
        ping_at = waits_since + HEADERS_S
        while True:
            told = await self._next(piece)
            if told is None and self._clock.now() >= ping_at:
                yield PING
                ping_at = self._clock.now() + PING_S
            if told is None:
                if self._clock.now() < waits_since + _DOUBT_S:
                    await asyncio.sleep(_LOOK_S)
                    continue
                record = await records.get(*self._key)
                if record.response.ended and await self._next(piece) is None:
                    kind = Completed if record.response.status == "completed" else Failed
                    yield encode_event(kind(sequence_number=number, response=record.response))
                    return
                waits_since = self._clock.now()
                continue
            whole, events = told
            first = 0 if whole else number
            fresh = events[max(number, after + 1) - first :]
            number, piece = first + len(events), piece + 1
            waits_since = self._clock.now()
            if fresh:
                yield b"".join(fresh)
                ping_at = self._clock.now() + PING_S
            if _last_of(events):
                return

    async def _next(self, piece: int) -> tuple[bool, list[bytes]] | None:
        """The next piece, or everything; says which. None: neither is there yet."""
        told = await self._store.get(*self._key, _PIECES, str(piece))
        if told is not None:
            return False, _split(told)
        told = await self._store.get(*self._key, _ALL)
        return None if told is None else (True, _split(told))


def _split(told: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in told.split(b"\n\n") if event]


def _last_of(events: list[bytes]) -> bool:
    return bool(events) and events[-1].startswith(_ENDS)
