"""POST /generate, and the sessions in which its requests may stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.gateway.http.budgets import budgeted
from antiphon.gateway.http.guard import tenant_of
from antiphon.gateway.http.limits import SMALL_BODY_BYTES_MAX
from antiphon.gateway.http.native import reading, refused
from antiphon.gateway.http.native.bodies import GenerateBody
from antiphon.gateway.http.native.replies import GenerateReply
from antiphon.gateway.http.native.voice import GenerateVoice
from antiphon.gateway.http.openai.completions import weight_version
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.parsing.formats import formats_of
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering, VoiceOf
    from antiphon.gateway.http.native.in_session import InSession
    from antiphon.gateway.http.native.reading import Posted
    from antiphon.gateway.http.native.record import Keep, RankOf
    from antiphon.gateway.http.voice import Voice
    from antiphon.gateway.sessions.sessions import Sessions
    from antiphon.gateway.stream import Stream
    from antiphon.service.service import Runtime

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
        in_session: InSession,
        runtime: Runtime,
        rank_of: RankOf,
    ) -> None:
        self._answering = answering
        self._tokenizers = tokenizers
        self._sessions = sessions
        self._in_session = in_session
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
            (ask,) = posted.asks

            async def voice(whole: Ask, streams: Sequence[Stream], keep: Keep) -> Voice:
                asked = msgspec.structs.replace(posted, asks=(whole,))
                return await self._voice(asked, streams, keep)

            return await self._in_session.answer(
                request, ask, params, voice, streamed=posted.stream
            )
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

    async def _open(self, request: web.Request) -> web.Response:
        body = await self._answering.read(
            request, OpenSession, lambda body: body, {"streaming": _STREAMING}
        )
        name = await self._sessions.open(
            tenant_of(request), body.session_id, body.capacity_of_str_len, body.timeout
        )
        return web.json_response(name)

    async def _close(self, request: web.Request) -> web.Response:
        body = await self._answering.read(
            request, CloseSession, lambda body: body, bytes_max=SMALL_BODY_BYTES_MAX
        )
        await self._sessions.close(tenant_of(request), body.session_id)
        return web.Response()


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
