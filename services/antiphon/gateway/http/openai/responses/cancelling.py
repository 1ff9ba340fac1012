"""Ends a response that is made in the background, whichever gateway makes it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.wire.abort import AbortRequests
from antiphon.wire.errors import Unavailable
from antiphon.wire.ids import ModelName
from antiphon.wire.routes import ABORT

if TYPE_CHECKING:
    from antiphon.gateway.entrance import Entrance
    from antiphon.gateway.http.openai.responses.records import Record, Records
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import TenantId

_LOOK_S = 0.05
_AGAIN_S = 0.5
"""How soon the other gateways are told again: an abort is heard once, or not at all."""
_PATIENCE_S = 10.0


class Cancelling:
    """Says it to every gateway of the model, until the one that owns it has written the end."""

    def __init__(self, runtime: Runtime, entrance: Entrance, records: Records) -> None:
        self._runtime = runtime
        self._entrance = entrance
        self._records = records

    async def cancel(self, tenant: TenantId, record: Record) -> Record:
        """Return it once it has ended: cancelled, or otherwise if that came first.

        Raises:
            Unavailable: It has not ended in time.
        """
        clock = self._runtime.clock
        give_up_at, say_at = clock.now() + _PATIENCE_S, clock.now()
        while not record.response.ended:
            if clock.now() >= give_up_at:
                raise Unavailable("the response has not ended yet", retry_after_s=1.0)
            if clock.now() >= say_at:
                say_at = clock.now() + _AGAIN_S
                await self._say(record)
            await asyncio.sleep(_LOOK_S)
            record = await self._records.find(tenant, record.response.id)
        return record

    async def _say(self, record: Record) -> None:
        name = record.response.id
        self._entrance.abort(name, exact=True)
        not_after_unix_ms = self._runtime.clock.unix_ms() + round(_AGAIN_S * 1000)
        message = AbortRequests(
            prefix=name, sender=self._runtime.process, not_after_unix_ms=not_after_unix_ms
        )
        self._runtime.bus.publish(ABORT, message, model=ModelName(record.response.model))
