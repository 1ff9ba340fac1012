"""Stored responses, each with the conversation it was generated from."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus.store import KeyValueStore, StoreLimits
from antiphon.gateway.gateway_liveness import GatewayLiveness
from antiphon.gateway.http.openai.responses.items import Item
from antiphon.gateway.http.openai.responses.replies import ResponseReply
from antiphon.gateway.http.openai.responses.write import as_failed
from antiphon.wire.base import Process
from antiphon.wire.buckets import RESPONSES
from antiphon.wire.errors import RequestTooLarge, Unavailable, UnknownResponse, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.openai.responses.schema import ResponsesBody
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import TenantId

_LOST_MESSAGE = "the gateway that was generating it was lost"
_ID = re.compile(r"resp_[0-9a-f]{32}")
"""Format of response ids. Any other id is unknown without asking the broker."""
_SHOWN = 64
_INSIST_S = 30.0
_PAUSE_S = 0.5


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A stored response. Fields may only be added, with defaults.

    Attributes:
        items: The whole conversation it answers, oldest first. So a response does not depend on
            earlier ones, which may expire before it.
        owner: The gateway that generates it.
        deadline_unix_ms: When the owner ends it at the latest.
        journal: Whether its events are stored too.
    """

    response: ResponseReply
    items: list[Item]
    owner: Process
    deadline_unix_ms: int
    journal: bool = False


class ResponseStore:
    """Stores responses per tenant, for all gateways.

    Attributes:
        store: The underlying store.
    """

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
                    text = f"{field}: response storage is disabled; enable it with responses.store"
                    raise Unsupported(text, param=field)
            return False
        if body.store is False:
            if body.background:
                text = "background: requires store to be true"
                raise Unsupported(text, param="background")
            return False
        await self.store.open()
        return True

    def check_size(self, items: Sequence[Item]) -> None:
        """Reject a conversation that is too long to be stored.

        Raises:
            RequestTooLarge: Names the limit.
        """
        size_bytes, most = len(msgspec.json.encode(items)), self._config.conversation_bytes_max
        if size_bytes > most:
            raise RequestTooLarge(
                f"The conversation has {size_bytes} bytes; at most {most} bytes can be "
                "stored. Set store to false.",
                param="input",
            )

    async def put(self, tenant: TenantId, record: StoredResponse) -> None:
        """Store a record, replacing the previous one.

        Raises:
            Unavailable: It was not stored.
        """
        response_id = record.response.id
        await self.store.put(tenant, response_id, value=msgspec.json.encode(record))

    async def put_with_retry(self, tenant: TenantId, record: StoredResponse) -> None:
        """Store a record that exists nowhere else; retries for a while.

        Raises:
            Unavailable: It was not stored in time.
        """
        give_up_at = self._runtime.clock.now() + _INSIST_S
        while True:
            try:
                return await self.put(tenant, record)
            except Unavailable:
                if self._runtime.clock.now() >= give_up_at:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def get(self, tenant: TenantId, response_id: str) -> StoredResponse:
        """Return a stored response. One whose owner is gone has failed.

        Raises:
            UnknownResponse: It does not exist.
            Unavailable: The broker cannot be reached.
        """
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
        """Delete a stored response.

        Raises:
            UnknownResponse: It does not exist.
            Unavailable: The broker cannot be reached.
        """
        if not await self.store.forget(tenant, response_id):
            raise UnknownResponse.of(response_id)
