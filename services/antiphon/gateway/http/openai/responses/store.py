"""Responses that are kept, each with the conversation that it was made from."""

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

_LOST = "the gateway that was making it is gone"
_ID = re.compile(r"resp_[0-9a-f]{32}")
"""What each is called. Another name is none of ours, and the broker need not be asked."""
_SHOWN = 64
_INSIST_S = 30.0
_PAUSE_S = 0.5


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is kept. Fields may come, with defaults; what is there stays.

    Attributes:
        items: The whole conversation that it answers, the oldest first. So a response needs none
            of those before it, which may be forgotten earlier.
        owner: The gateway that makes it.
        deadline_unix_ms: When the owner ends it, if not before.
        journal: Whether its events are kept, too.
    """

    response: ResponseReply
    items: list[Item]
    owner: Process
    deadline_unix_ms: int
    journal: bool = False


class ResponseStore:
    """Keeps records for each tenant, whichever gateway asks.

    Attributes:
        store: Where they lie.
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
        """Whether a response is to be kept; if so, that is possible now.

        Raises:
            Unsupported: It asks for what takes a kept response, and none is kept.
            Unavailable: The broker cannot keep it now.
        """
        if not self._config.store:
            for field in ("store", "background", "previous_response_id"):
                if getattr(body, field):
                    text = f"{field}: this server keeps no responses (responses.store)"
                    raise Unsupported(text, param=field)
            return False
        if body.store is False:
            if body.background:
                text = "background: a response that nobody waits for has to be stored"
                raise Unsupported(text, param="background")
            return False
        await self.store.open()
        return True

    def check_size(self, items: Sequence[Item]) -> None:
        """Refuse a conversation that is too long to be kept.

        Raises:
            RequestTooLarge: Say `store: false`.
        """
        size_bytes, most = len(msgspec.json.encode(items)), self._config.conversation_bytes_max
        if size_bytes > most:
            raise RequestTooLarge(
                f"The conversation has {size_bytes} bytes; {most} are stored. Say store: false.",
                param="input",
            )

    async def put(self, tenant: TenantId, record: StoredResponse) -> None:
        """Keep a record, in place of the one before.

        Raises:
            Unavailable: It is not kept.
        """
        response_id = record.response.id
        await self.store.put(tenant, response_id, value=msgspec.json.encode(record))

    async def put_with_retry(self, tenant: TenantId, record: StoredResponse) -> None:
        """Keep a record that nobody else knows of; try again for a while.

        Raises:
            Unavailable: It was not kept in time.
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
        """Return what is kept. A response that nobody makes any more has failed.

        Raises:
            UnknownResponse: There is none.
            Unavailable: The broker cannot be asked.
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
        record = msgspec.structs.replace(record, response=as_failed(record.response, _LOST))
        await self.put(tenant, record)
        return record

    async def delete(self, tenant: TenantId, response_id: str) -> None:
        """Keep a response no longer.

        Raises:
            UnknownResponse: There is none.
            Unavailable: The broker cannot be asked.
        """
        if not await self.store.forget(tenant, response_id):
            raise UnknownResponse.of(response_id)
