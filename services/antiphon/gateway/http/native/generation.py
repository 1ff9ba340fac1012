"""POST /generate, and the sessions in which its requests may stand."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.gateway.http.budgets import budgeted
from antiphon.gateway.http.guard import tenant_of
from antiphon.gateway.http.native import reading, refused
from antiphon.gateway.http.native.bodies import GenerateBody
from antiphon.gateway.http.native.replies import GenerateReply
from antiphon.gateway.http.native.voice import GenerateVoice
from antiphon.gateway.http.openai.completions import weight_version
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.parsing.formats import formats_of
from antiphon.gateway.sessions.session import Place
from antiphon.service.deadline import deadline_in
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import ClientKey, new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering, VoiceOf
    from antiphon.gateway.http.native.bodies import SessionParams
    from antiphon.gateway.http.native.reading import Posted
    from antiphon.gateway.http.native.voice import Keep
    from antiphon.gateway.http.voice import Voice
    from antiphon.gateway.sessions.sessions import Sessions
    from antiphon.gateway.stream import Stream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import InstanceId, TenantId

log = logging.getLogger(__name__)

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """POST /open_session. `capacity_of_str_len` 0 sets no bound; `timeout` is of idleness, in s."""

    capacity_of_str_len: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    session_id: Name | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None


class CloseSession(msgspec.Struct, frozen=True):
    """POST /close_session."""

    session_id: Name


class Generation:
    """Reads, stands requests in their sessions, and gives each answer its voice.

    `rank_of` tells the place of a worker among them.
    """

    def __init__(
        self,
        answering: Answering,
        tokenizers: TokenizerCalls,
        sessions: Sessions,
        runtime: Runtime,
        rank_of: Callable[[InstanceId], int | None],
    ) -> None:
        self._answering = answering
        self._tokenizers = tokenizers
        self._sessions = sessions
        self._runtime = runtime
        self._rank_of = rank_of

    def operations(self) -> list[Operation]:
        """Generation and sessions."""
        return [
            *(
                Operation(
                    method=method,
                    path="/generate",
                    answer=self._generate,
                    summary="What follows a prompt, or each of a batch; a batch gets a list.",
                    body=GenerateBody,
                    reply=GenerateReply | list[GenerateReply],
                    refused=refused.GENERATE,
                    examples=_EXAMPLES,
                    deprecated=method == "PUT",
                )
                for method in ("POST", "PUT")
            ),
            Operation(
                method="POST",
                path="/open_session",
                answer=self._open,
                summary="Begins a session, open at every gateway; its name is the reply.",
                body=OpenSession,
                reply=str,
                refused={"streaming": _STREAMING},
                examples=({"capacity_of_str_len": 1000},),
            ),
            Operation(
                method="POST",
                path="/close_session",
                answer=self._close,
                summary="Forgets a session, and aborts what runs in it.",
                body=CloseSession,
                examples=({"session_id": "mine"},),
            ),
        ]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        posted, params = await self._answering.read(
            request,
            GenerateBody,
            lambda body: (reading.generate(body), body.session_params),
            refused.GENERATE,
        )
        if posted.budget is not None:
            posted = await self._budgeted(posted, posted.budget)
        if params is not None:
            return await self._in_session(request, posted, params)
        return await self._answering.answer(
            request, posted.asks, self._voices(posted), streamed=posted.stream
        )

    async def _budgeted(self, posted: Posted, tokens_max: int) -> Posted:
        """Let the thinking of every answer be ended."""
        formats = await formats_of(
            self._runtime.settings.gateway, self._tokenizers.card, self._tokenizers.writes
        )
        asks = [
            await budgeted(
                ask, tokens_max, formats.reasoning, self._tokenizers, param="max_thinking_tokens"
            )
            for ask in posted.asks
        ]
        return msgspec.structs.replace(posted, asks=tuple(asks))

    def _voices(self, posted: Posted) -> VoiceOf:
        async def voice(streams: Sequence[Stream]) -> Voice:
            return await self._voice(posted, streams)

        return voice

    async def _voice(
        self, posted: Posted, streams: Sequence[Stream], keep: Keep | None = None
    ) -> GenerateVoice:
        return GenerateVoice(
            posted,
            streams,
            firsts=await self._firsts(posted, streams),
            rank_of=self._rank_of,
            weight_version=weight_version(self._runtime),
            news=self._runtime.settings.gateway.stream_output,
            keep=keep,
        )

    async def _firsts(self, posted: Posted, streams: Sequence[Stream]) -> list[str | None]:
        """The text of each prompt's first token, where that is told: a tokenizer writes it."""
        named = [
            unpack_ids(stream.submit.prompt_ids[:4])
            for stream, telling in zip(streams, posted.tellings, strict=True)
            if telling.names_first
        ]
        texts = iter(
            await self._tokenizers.decode(named, skip_special_tokens=False) if named else ()
        )
        return [next(texts) if telling.names_first else None for telling in posted.tellings]

    async def _in_session(
        self, request: web.Request, posted: Posted, params: SessionParams
    ) -> web.StreamResponse:
        place = Place(
            params.id,
            params.rid,
            params.offset,
            bool(params.replace),
            bool(params.drop_previous_output),
        )
        (ask,) = posted.asks
        tenant, sessions = tenant_of(request), self._sessions
        before = await sessions.before(tenant, place)
        characters = await self._characters(ask)
        prompt_ids = before + await self._ids(ask, begins=not before)
        rid = str(ask.key or new_request_id())
        ask = msgspec.structs.replace(ask, prompt=None, prompt_ids=prompt_ids, key=ClientKey(rid))
        posted = msgspec.structs.replace(posted, asks=(ask,))
        kept = False

        async def keep(stream: Stream, heard: GenerateVoice) -> None:
            nonlocal kept
            if _whole(stream):
                answer = (prompt_ids, tuple(heard.first_ids), heard.first_text)
                await sessions.end(tenant, place, rid, answer)
                kept = True

        async def voice(streams: Sequence[Stream]) -> Voice:
            await sessions.accept(tenant, place, rid)
            return await self._voice(posted, streams, keep)

        await sessions.begin(tenant, place, rid, characters)
        try:
            return await self._answering.answer(request, posted.asks, voice, streamed=posted.stream)
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

    async def _ids(self, ask: Ask, *, begins: bool) -> tuple[int, ...]:
        """The ids of what is new. Special tokens stand at the beginning of a session only."""
        if ask.prompt_ids is not None:
            return ask.prompt_ids
        timeout_s = self._runtime.settings.gateway.request_timeout_s
        encoded = await self._tokenizers.encode(
            msgspec.structs.replace(ask, special_tokens=begins),
            new_request_id(),
            deadline_in(timeout_s, self._runtime.clock),
            None,
        )
        return tuple(unpack_ids(encoded.token_ids))

    async def _open(self, request: web.Request) -> web.Response:
        body = await self._answering.read(
            request, OpenSession, lambda body: body, {"streaming": _STREAMING}
        )
        name = await self._sessions.open(
            tenant_of(request), body.session_id, body.capacity_of_str_len, body.timeout
        )
        return web.json_response(name)

    async def _close(self, request: web.Request) -> web.Response:
        body = await self._answering.read(request, CloseSession, lambda body: body)
        await self._sessions.close(tenant_of(request), body.session_id)
        return web.Response()


def _whole(stream: Stream) -> bool:
    """Whether all of an answer was heard: one that broke off is nothing to go on from."""
    return stream.ended is not None and stream.ended.error is None and not stream.waiting


_STREAMING = refused.Refused("a session is kept as ids; none holds pages of the cache", (False,))
_EXAMPLES = (
    {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 4}},
    {
        "text": ["One", "Two"],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "n": 2},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
    },
    {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}, "stream": True},
)
