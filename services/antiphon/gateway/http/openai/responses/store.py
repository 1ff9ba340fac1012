"""Stored responses with their conversations, and the events of background ones."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus.store import KeyValueStore, StoreLimits
from antiphon.gateway.http.core.keepalive import HEADERS_S, PING_S
from antiphon.gateway.http.core.writer import PING
from antiphon.gateway.http.openai.responses.items import Item
from antiphon.gateway.http.openai.responses.schema import ItemList, ResponseReply, ResponsesBody
from antiphon.gateway.http.openai.responses.write import as_failed, encode_event, response_event
from antiphon.gateway.peers import GatewayLiveness
from antiphon.wire.base import Process
from antiphon.wire.errors import (
    EngineError,
    InvalidRequest,
    RequestTooLarge,
    Unavailable,
    UnknownResponse,
    Unsupported,
)
from antiphon.wire.ids import ModelName, TenantId
from antiphon.wire.routes import ABORT, RESPONSES
from antiphon.wire.submit import AbortRequests

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from antiphon.gateway.requests.submission import Submission
    from antiphon.service.service import Runtime

_LOST_MESSAGE = "the gateway that was generating it was lost"
_ID = re.compile(r"resp_[0-9a-f]{32}")
"""Format of response ids. Any other id is unknown without asking the broker."""
_SHOWN = 64
_INSIST_S = 30.0
_PAUSE_S = 0.5

PAGE_QUERY = {
    "limit": "Number of items to return, 1 to 100. Defaults to 20.",
    "order": "`desc` (default) for the newest items first, or `asc`.",
    "after": "Id of an item after which the page starts.",
}
_PAGE = 20
_PAGE_MAX = 100
_LOOK_S = 0.05
_RETRY_INTERVAL_S = 0.5
"""Interval for notifying the other gateways: an abort is received once, or not at all."""
_PATIENCE_S = 10.0

log = logging.getLogger(__name__)
_FLUSH_INTERVAL_S = 0.1
"""Events of this period are stored together: one message per step would be thousands."""
_CHECK_AFTER_S = 1.0
"""After this time without events, the reader checks whether more will come."""
_ENDS = tuple(
    f"event: response.{kind}\n".encode() for kind in ("completed", "incomplete", "failed")
)
_PIECES, _ALL = "events", "told"  # keys of stored values, which stay


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A stored response. Fields may only be added, with defaults.

    `items` is the whole conversation it answers, oldest first: a response does not depend on
    earlier ones, which may expire before it. The `owner` generates it, until `deadline_unix_ms` at
    the latest. `journal`: whether its events are stored too.
    """

    response: ResponseReply
    items: list[Item]
    owner: Process
    deadline_unix_ms: int
    journal: bool = False


class ResponseStore:
    """Stores responses per tenant, for all gateways."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.clock = runtime.clock
        self._config = config = runtime.settings.responses
        self._owners = GatewayLiveness(runtime)
        limits = StoreLimits(
            keep_s=config.keep_s, bytes_max=config.bytes_max, replicas=config.replicas
        )
        self.store = KeyValueStore(runtime.bus, RESPONSES, limits)

    async def should_store(self, body: ResponsesBody) -> bool:
        """Whether to store a response; if so, check that it is possible now.

        Raises:
            Unsupported: The request requires storage, which is disabled.
            Unavailable: The broker cannot store it now.
        """
        if not self._config.store:
            for field in ("store", "background", "previous_response_id"):
                if getattr(body, field):
                    raise Unsupported.at(
                        field, "response storage is disabled; enable it with responses.store"
                    )
            return False
        if body.store is False:
            if body.background:
                raise Unsupported.at("background", "requires store to be true")
            return False
        await self.store.open()
        return True

    def check_size(self, items: Sequence[Item]) -> None:
        size_bytes, most = len(msgspec.json.encode(items)), self._config.conversation_bytes_max
        if size_bytes > most:
            raise RequestTooLarge(
                f"The conversation has {size_bytes} bytes; at most {most} bytes can be "
                "stored. Set store to false.",
                param="input",
            )

    async def put(self, tenant: TenantId, record: StoredResponse) -> None:
        response_id = record.response.id
        await self.store.put(tenant, response_id, value=msgspec.json.encode(record))

    async def put_with_retry(self, tenant: TenantId, record: StoredResponse) -> None:
        """Store a record that exists nowhere else; retries for a while."""
        give_up_at = self.clock.now() + _INSIST_S
        while True:
            try:
                return await self.put(tenant, record)
            except Unavailable:
                if self.clock.now() >= give_up_at:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def get(self, tenant: TenantId, response_id: str) -> StoredResponse:
        """Return a stored response. One whose owner is gone has failed."""
        if not self._config.store or not _ID.fullmatch(response_id):
            raise UnknownResponse.of(response_id[:_SHOWN])
        value = await self.store.get(tenant, response_id)
        if value is None:
            raise UnknownResponse.of(response_id)
        record = msgspec.json.decode(value, type=StoredResponse)
        if record.response.ended or not self._owners.is_abandoned(
            record.owner, record.deadline_unix_ms
        ):
            return record
        record = msgspec.structs.replace(record, response=as_failed(record.response, _LOST_MESSAGE))
        await self.put(tenant, record)
        return record

    async def delete(self, tenant: TenantId, response_id: str) -> None:
        if not await self.store.forget(tenant, response_id):
            raise UnknownResponse.of(response_id)

    async def cancel(
        self, tenant: TenantId, record: StoredResponse, submission: Submission
    ) -> StoredResponse:
        """Return the response once it has ended: cancelled, or otherwise if that came first.

        Every gateway of the model is notified, until the owner has stored the final state.
        """
        give_up_at, say_at = self.clock.now() + _PATIENCE_S, self.clock.now()
        while not record.response.ended:
            if self.clock.now() >= give_up_at:
                raise Unavailable("the response has not ended yet", retry_after_s=1.0)
            if self.clock.now() >= say_at:
                say_at = self.clock.now() + _RETRY_INTERVAL_S
                submission.abort(record.response.id, exact=True)
                self._publish_abort(record.response)
            await asyncio.sleep(_LOOK_S)
            record = await self.get(tenant, record.response.id)
        return record

    def _publish_abort(self, response: ResponseReply) -> None:
        not_after_unix_ms = self.clock.unix_ms() + round(_RETRY_INTERVAL_S * 1000)
        message = AbortRequests(
            prefix=response.id,
            sender=self._runtime.process,
            not_after_unix_ms=not_after_unix_ms,
        )
        self._runtime.bus.publish(ABORT, message, model=ModelName(response.model))


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> ItemList:
    limit, order = _page_size(query.get("limit", str(_PAGE))), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest.at("order", "must be asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    ordered = _after(ordered, query.get("after"))
    page = ordered[:limit]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(ordered) > limit,
    )


def _page_size(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:4]) <= _PAGE_MAX:
        raise InvalidRequest.at("limit", f"must be 1 to {_PAGE_MAX}")
    return int(text)


def _after(items: list[Item], after: str | None) -> list[Item]:
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest.at("after", f"unknown item '{after}'")
    return items if after is None else items[ids.index(after) + 1 :]


class ResponseEventLog:
    """The events of one response. The gateway that generates it writes; any gateway reads.

    Numbered pieces are stored one after another. After the last one they are replaced by one value
    with all events.
    """

    def __init__(self, records: ResponseStore, tenant: TenantId, response_id: str) -> None:
        self._records = records
        self._store = records.store
        self._clock = records.clock
        self._key = (tenant, response_id)
        self._written: list[bytes] = []
        self._buffered: list[bytes] = []
        self._buffered_at = self._clock.now()

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

    async def read(self, after: int) -> AsyncGenerator[bytes]:
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
                record = await self._records.get(*self._key)
                if record.response.ended and await self._next(piece) is None:
                    kind = "completed" if record.response.status == "completed" else "failed"
                    yield encode_event(response_event(kind, number, response=record.response))
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
