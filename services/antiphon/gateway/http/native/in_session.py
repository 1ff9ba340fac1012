"""Requests that stand in a session: what they go on from, and what is kept of their answers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.guard import tenant_of
from antiphon.gateway.sessions.session import Place
from antiphon.service.deadline import deadline_in
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import ClientKey, new_request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp import web

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering
    from antiphon.gateway.http.native.bodies import SessionParams
    from antiphon.gateway.http.native.record import Keep
    from antiphon.gateway.http.native.told import Told
    from antiphon.gateway.http.voice import Voice
    from antiphon.gateway.sessions.sessions import Sessions
    from antiphon.gateway.stream import Stream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import TenantId

    VoiceInSession = Callable[[Ask, Sequence[Stream], Keep], Awaitable[Voice]]

log = logging.getLogger(__name__)


class InSession:
    """Answers requests from where they stand, and puts by what was said for the next one."""

    def __init__(
        self,
        answering: Answering,
        tokenizers: TokenizerCalls,
        sessions: Sessions,
        runtime: Runtime,
    ) -> None:
        self._answering = answering
        self._tokenizers = tokenizers
        self._sessions = sessions
        self._runtime = runtime

    async def answer(
        self,
        request: web.Request,
        ask: Ask,
        params: SessionParams,
        voice_of: VoiceInSession,
        *,
        streamed: bool,
    ) -> web.StreamResponse:
        """Answer a request, whole or as it is said.

        Args:
            request: The client's.
            ask: What is new in it.
            params: Where it stands.
            voice_of: Makes the voice, of all that is asked; its record keeps what is said.
            streamed: Whether it is told as it is said.

        Raises:
            EngineError: It cannot stand there, or something went wrong before anything was told.
        """
        place = Place(
            params.id,
            params.rid,
            params.offset,
            bool(params.replace),
            bool(params.drop_previous_output),
        )
        tenant, sessions = tenant_of(request), self._sessions
        before = await sessions.before(tenant, place)
        characters = await self._characters(ask)
        prompt_ids = before + await self._ids(ask, tenant, begins=not before)
        rid = str(ask.key or new_request_id())
        whole = msgspec.structs.replace(ask, prompt=None, prompt_ids=prompt_ids, key=ClientKey(rid))
        kept = False

        async def keep(stream: Stream, told: Told) -> None:
            nonlocal kept
            if _whole(stream):
                read = tuple(unpack_ids(stream.submit.prompt_ids))
                answer = (read, tuple(told.ids), "".join(told.texts))
                await sessions.end(tenant, place, rid, answer)
                kept = True

        async def voice(streams: Sequence[Stream]) -> Voice:
            await sessions.accept(tenant, place, rid)
            return await voice_of(whole, streams, keep)

        await sessions.begin(tenant, place, rid, characters)
        try:
            return await self._answering.answer(request, [whole], voice, streamed=streamed)
        finally:
            if not kept:
                await self._give_up(tenant, place, rid)

    async def _give_up(self, tenant: TenantId, place: Place, rid: str) -> None:
        """Nothing goes on from a request that broke off."""
        try:
            await self._sessions.end(tenant, place, rid, None)
        except EngineError as error:
            log.info("session not told of an end", extra={"code": error.code})

    async def _characters(self, ask: Ask) -> int:
        """The characters of what is new, however it was given."""
        if ask.prompt_ids is None:
            return len(ask.prompt or "")
        (text,) = await self._tokenizers.decode([ask.prompt_ids], skip_special_tokens=False)
        return len(text)

    async def _ids(self, ask: Ask, tenant: TenantId, *, begins: bool) -> tuple[int, ...]:
        """The ids of what is new. Special tokens stand at the beginning of a session only."""
        if ask.prompt_ids is not None:
            return ask.prompt_ids
        timeout_s = self._runtime.settings.gateway.request_timeout_s
        encoded = await self._tokenizers.encode(
            msgspec.structs.replace(ask, tenant=tenant, special_tokens=begins),
            new_request_id(),
            deadline_in(timeout_s, self._runtime.clock),
            None,
            truncate=self._runtime.settings.gateway.allow_auto_truncate,
        )
        return tuple(unpack_ids(encoded.token_ids))


def _whole(stream: Stream) -> bool:
    """Whether all of an answer was heard: one that broke off is nothing to go on from."""
    return stream.ended is not None and stream.ended.error is None and not stream.waiting
