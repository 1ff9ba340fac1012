"""Requests of a session: the context they continue from, and storage of their output."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.chat import ParsedPrompts
from antiphon.gateway.http.core.resume import refuse_resume
from antiphon.service.clock import deadline_in
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import ClientKey, TenantId, new_request_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.http.core.meta_info import GenerateReplyWriter, PersistReply
    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.gateway.sessions import SessionParams, Sessions
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.service.service import Runtime

log = logging.getLogger(__name__)


P = TypeVar("P", bound=ParsedPrompts)
SessionWriterFactory = Callable[
    [P, "Sequence[RequestStream]", "PersistReply | None"], Awaitable["ResponseWriter"]
]


@dataclass(frozen=True)
class SessionRequests:
    """Runs requests from their position in a session, and stores their output for the next one."""

    response_handler: ResponseHandler
    tokenizers: TokenizerClient
    sessions: Sessions
    runtime: Runtime

    async def answer(
        self,
        request: web.Request,
        parsed: P,
        place: SessionParams | None,
        make_writer: SessionWriterFactory[P],
    ) -> web.StreamResponse:
        """Run the requests of a body, or the one of a session, streaming or not.

        In a session `parsed` has the new part of the prompt; `make_writer` gets the whole prompt.
        """
        if place is None:
            return await self.response_handler.answer(
                request,
                parsed.gen_requests,
                lambda streams: make_writer(parsed, streams, None),
                streamed=parsed.stream,
            )
        refuse_resume(request, "requests of a session cannot be resumed")
        (gen_request,) = parsed.gen_requests
        tenant, sessions = tenant_of(request), self.sessions
        before = await sessions.previous_ids(tenant, place)
        characters = await self._characters(gen_request)
        prompt_ids = before + await self._ids(gen_request, tenant, begins=not before)
        rid = str(gen_request.key or new_request_id())
        whole = msgspec.structs.replace(
            gen_request, prompt=None, prompt_ids=prompt_ids, key=ClientKey(rid)
        )
        whole_body = msgspec.structs.replace(parsed, gen_requests=(whole,))
        persisted = False

        async def keep(stream: RequestStream, reply: GenerateReplyWriter) -> None:
            nonlocal persisted
            if _is_complete(stream):
                read = tuple(unpack_ids(stream.submit.prompt_ids))
                answer = (read, tuple(reply.ids), "".join(reply.texts))
                await sessions.end(tenant, place, rid, answer)
                persisted = True

        async def writer(streams: Sequence[RequestStream]) -> ResponseWriter:
            await sessions.accept(tenant, place, rid)
            return await make_writer(whole_body, streams, keep)

        await sessions.begin(tenant, place, rid, characters)
        try:
            return await self.response_handler.answer(
                request, [whole], writer, streamed=parsed.stream
            )
        finally:
            if not persisted:
                await self._end_without_output(tenant, place, rid)

    async def _end_without_output(self, tenant: TenantId, place: SessionParams, rid: str) -> None:
        try:
            await self.sessions.end(tenant, place, rid, None)
        except EngineError as error:
            log.info("session not notified of the end", extra={"code": error.code})

    async def _characters(self, gen_request: GenerationRequest) -> int:
        """Number of characters or tokens of the new part."""
        if gen_request.prompt_ids is None:
            return len(gen_request.prompt or "")
        (text,) = await self.tokenizers.decode([gen_request.prompt_ids], skip_special_tokens=False)
        return len(text)

    async def _ids(
        self, gen_request: GenerationRequest, tenant: TenantId, *, begins: bool
    ) -> tuple[int, ...]:
        """Token ids of the new part. Special tokens are added at the start of a session only."""
        if gen_request.prompt_ids is not None:
            return gen_request.prompt_ids
        timeout_s = self.runtime.settings.gateway.request_timeout_s
        encoded = await self.tokenizers.encode(
            msgspec.structs.replace(gen_request, tenant=tenant, special_tokens=begins),
            new_request_id(),
            deadline_in(timeout_s, self.runtime.clock),
            None,
            truncate=self.runtime.settings.gateway.allow_auto_truncate,
        )
        return tuple(unpack_ids(encoded.token_ids))


def _is_complete(stream: RequestStream) -> bool:
    """Whether all output was received: an interrupted request cannot be continued."""
    return stream.ended is not None and stream.ended.error is None and not stream.has_events
