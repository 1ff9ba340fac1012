"""POST /generate, and the sessions in which its requests may stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.gateway.http.guard import tenant_of
from antiphon.gateway.http.native import reading, refused
from antiphon.gateway.http.native.bodies import GenerateBody
from antiphon.gateway.http.native.replies import GenerateReply
from antiphon.gateway.http.native.voice import GenerateVoice
from antiphon.gateway.http.openai.completions import weight_version
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.sessions import Place
from antiphon.service.deadline import deadline_in
from antiphon.wire.codec import unpack_ids
from antiphon.wire.ids import ClientKey, new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering, VoiceOf
    from antiphon.gateway.http.native.bodies import SessionParams
    from antiphon.gateway.http.native.reading import Posted
    from antiphon.gateway.http.voice import Voice
    from antiphon.gateway.sessions import Sessions
    from antiphon.gateway.stream import Stream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import TenantId

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """POST /open_session. `capacity_of_str_len` 0 sets no bound; `timeout` is of idleness, in s."""

    capacity_of_str_len: Annotated[int, Meta(ge=0)] = 0
    session_id: Name | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None


class CloseSession(msgspec.Struct, frozen=True):
    """POST /close_session."""

    session_id: Name


class Generation:
    """Reads, stands requests in their sessions, and gives each answer its voice.

    `sessions_of` makes a tenant's sessions: no other finds them.
    """

    def __init__(
        self,
        answering: Answering,
        tokenizers: TokenizerCalls,
        sessions_of: Callable[[TenantId], Sessions],
        runtime: Runtime,
    ) -> None:
        self._answering = answering
        self._tokenizers = tokenizers
        self._sessions_of = sessions_of
        self._sessions: dict[TenantId, Sessions] = {}
        self._runtime = runtime

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
                    reply=GenerateReply,
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
                summary="Begins a session, kept by this gateway; its name is the reply.",
                body=OpenSession,
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
        if params is not None:
            return await self._in_session(request, posted, params)
        return await self._answering.answer(
            request, posted.asks, self._voices(posted), streamed=posted.stream
        )

    def _voices(self, posted: Posted) -> VoiceOf:
        async def voice(streams: Sequence[Stream]) -> Voice:
            return self._voice(posted, streams)

        return voice

    def _voice(self, posted: Posted, streams: Sequence[Stream]) -> GenerateVoice:
        return GenerateVoice(
            posted,
            streams,
            weight_version=weight_version(self._runtime),
            news=self._runtime.settings.gateway.stream_output,
        )

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
        sessions = self._of(request)
        before = sessions.before(place)
        characters = await self._characters(ask)
        prompt_ids = before + await self._ids(ask, begins=not before)
        rid = str(ask.key or new_request_id())
        ask = msgspec.structs.replace(ask, prompt=None, prompt_ids=prompt_ids, key=ClientKey(rid))
        posted = msgspec.structs.replace(posted, asks=(ask,))
        sessions.begin(place, rid, prompt_ids, characters)
        heard: list[tuple[Stream, GenerateVoice]] = []

        async def voice(streams: Sequence[Stream]) -> Voice:
            sessions.accept(place, rid)
            heard.append((streams[0], self._voice(posted, streams)))
            return heard[0][1]

        try:
            return await self._answering.answer(request, posted.asks, voice, streamed=posted.stream)
        finally:
            sessions.end(place, rid, _answer(*heard[0]) if heard else None)

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
        sessions = self._of(request)
        name = await self._answering.read(
            request,
            OpenSession,
            lambda body: sessions.open(body.session_id, body.capacity_of_str_len, body.timeout),
            {"streaming": _STREAMING},
        )
        return web.json_response(name)

    async def _close(self, request: web.Request) -> web.Response:
        sessions = self._of(request)
        await self._answering.read(
            request, CloseSession, lambda body: sessions.close(body.session_id)
        )
        return web.Response()

    def _of(self, request: web.Request) -> Sessions:
        tenant = tenant_of(request)
        if tenant not in self._sessions:
            self._sessions[tenant] = self._sessions_of(tenant)
        return self._sessions[tenant]


def _answer(stream: Stream, voice: GenerateVoice) -> tuple[tuple[int, ...], str] | None:
    """The answer, if all of it was heard: one that broke off is nothing to go on from."""
    if stream.ended is None or stream.ended.error is not None or stream.waiting:
        return None
    return tuple(voice.first_ids), voice.first_text


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
