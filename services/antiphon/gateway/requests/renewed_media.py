"""Media of requests that this gateway has adopted: held here, to be embedded again."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.service.clock import remaining_s
from antiphon.service.tasks import isolated
from antiphon.wire.errors import EngineError, InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.gateway.media.intake import MediaIntake
    from antiphon.gateway.media.stored import HeldMedia
    from antiphon.gateway.owner.driver import OwnerDriver
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.service.service import Runtime
    from antiphon.wire.media import Medium
    from antiphon.wire.submit import SubmitRequest

log = logging.getLogger(__name__)

PAUSES_S = (0.0, 1.0, 4.0)
"""Before each try: a source may be away, or the store full, for a moment."""


@dataclass(frozen=True, eq=False)
class RenewedMedia:
    """Brings the media of adopted requests here, while their streams go on.

    They come from the client's request, which was sent again, or else from the gateway before.
    `open_media` fetches those of a request, which are held for so many seconds.
    """

    runtime: Runtime
    driver: OwnerDriver
    intake: MediaIntake
    open_media: Callable[[GenerationRequest, float], Awaitable[HeldMedia]]

    def begin(self, gen_request: GenerationRequest, submit: SubmitRequest) -> None:
        if submit.media:
            work = isolated(self._run, gen_request, submit)
            self.runtime.group.create_task(work, name="media")

    async def _run(self, gen_request: GenerationRequest, submit: SubmitRequest) -> None:
        """Without its media a stream goes on: only if they are needed, it ends with the error."""
        reason: EngineError | None = None
        for pause_s in PAUSES_S:
            await asyncio.sleep(pause_s)
            if self.driver.find(submit.request_id) is None:
                return
            try:
                held, media = await self._brought(gen_request, submit)
            except EngineError as error:
                reason = error
            else:
                self.driver.hold_media(submit.request_id, held, media)
                return
        assert reason is not None, "there is a try"
        fields = {"request_id": submit.request_id, "code": reason.code, "reason": reason.message}
        log.warning("media not renewed", extra=fields)
        self.driver.lose_media(submit.request_id, _lost(reason))

    async def _brought(
        self, gen_request: GenerationRequest, submit: SubmitRequest
    ) -> tuple[HeldMedia, tuple[Medium, ...]]:
        """Hold the media here; return the request's with claims of this gateway.

        Raises:
            EngineError: They are nowhere: why they are not in the client's request.
        """
        left_s = remaining_s(submit.deadline_unix_ms, self.runtime.clock)
        try:
            held = await self.open_media(gen_request, left_s)
            try:
                return held, held.renewed(submit.media)
            except InvalidRequest:
                held.discard()
                raise
        except EngineError:
            with suppress(EngineError):
                held = await self.intake.take_over(submit.media, left_s)
                return held, held.renewed(submit.media)
            raise


def _lost(reason: EngineError) -> Unavailable:
    return Unavailable(
        "a medium of the request was lost with the gateway that held it, and could not be fetched "
        f"again: {reason.message}; send the request again without Last-Event-ID",
        param=reason.param,
        retry_after_s=1.0,
    )
