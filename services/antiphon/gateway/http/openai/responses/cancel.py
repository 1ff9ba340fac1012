"""Cancels a background response, whichever gateway generates it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.wire.abort import AbortRequests
from antiphon.wire.errors import Unavailable
from antiphon.wire.ids import ModelName
from antiphon.wire.routes import ABORT

if TYPE_CHECKING:
    from antiphon.gateway.http.openai.responses.store import ResponseStore, StoredResponse
    from antiphon.gateway.requests.submission import Submission
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import TenantId

_LOOK_S = 0.05
_RETRY_INTERVAL_S = 0.5
"""Interval for notifying the other gateways: an abort is received once, or not at all."""
_PATIENCE_S = 10.0


class ResponseCanceller:
    """Notifies every gateway of the model, until the owner has stored the final state."""

    def __init__(self, runtime: Runtime, submission: Submission, records: ResponseStore) -> None:
        self._runtime = runtime
        self._submission = submission
        self._records = records

    async def cancel(self, tenant: TenantId, record: StoredResponse) -> StoredResponse:
        """Return the response once it has ended: cancelled, or otherwise if that came first.

        Raises:
            Unavailable: It has not ended in time.
        """
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
