"""Stored responses, each with the conversation it was generated from."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus.store import KeyValueStore, StoreLimits
from antiphon.gateway.gateway_liveness import GatewayLiveness
from antiphon.gateway.http.openai.responses.items import Item
from antiphon.gateway.http.openai.responses.replies import ItemList, ResponseReply
from antiphon.gateway.http.openai.responses.write import as_failed
from antiphon.wire.abort import AbortRequests
from antiphon.wire.base import Process
from antiphon.wire.buckets import RESPONSES
from antiphon.wire.errors import (
    InvalidRequest,
    RequestTooLarge,
    Unavailable,
    UnknownResponse,
    Unsupported,
)
from antiphon.wire.ids import ModelName
from antiphon.wire.routes import ABORT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.gateway.http.openai.responses.schema import ResponsesBody
    from antiphon.gateway.requests.submission import Submission
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import TenantId

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
        give_up_at = self._runtime.clock.now() + _INSIST_S
        while True:
            try:
                return await self.put(tenant, record)
            except Unavailable:
                if self._runtime.clock.now() >= give_up_at:
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
    if after is None:
        return items
    for index, item in enumerate(items):
        if item.id == after:
            return items[index + 1 :]
    raise InvalidRequest.at("after", f"unknown item '{after}'")


class ResponseCanceller:
    """Notifies every gateway of the model, until the owner has stored the final state."""

    def __init__(self, runtime: Runtime, submission: Submission, records: ResponseStore) -> None:
        self._runtime = runtime
        self._submission = submission
        self._records = records

    async def cancel(self, tenant: TenantId, record: StoredResponse) -> StoredResponse:
        """Return the response once it has ended: cancelled, or otherwise if that came first."""
        clock = self._runtime.clock
        give_up_at, say_at = clock.now() + _PATIENCE_S, clock.now()
        while not record.response.ended:
            if clock.now() >= give_up_at:
                raise Unavailable("the response has not ended yet", retry_after_s=1.0)
            if clock.now() >= say_at:
                say_at = clock.now() + _RETRY_INTERVAL_S
                await self._publish(record)
            await asyncio.sleep(_LOOK_S)
            record = await self._records.get(tenant, record.response.id)
        return record

    async def _publish(self, record: StoredResponse) -> None:
        name = record.response.id
        self._submission.abort(name, exact=True)
        not_after_unix_ms = self._runtime.clock.unix_ms() + round(_RETRY_INTERVAL_S * 1000)
        message = AbortRequests(
            prefix=name, sender=self._runtime.process, not_after_unix_ms=not_after_unix_ms
        )
        self._runtime.bus.publish(ABORT, message, model=ModelName(record.response.model))
