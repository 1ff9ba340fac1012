"""/generate, and the sessions its requests may belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.chat import with_reasoning_tokens
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.core.meta_info import GenerateOutputs, weight_version
from antiphon.gateway.http.native.parse import ParsedGenerateRequest, parse_generate
from antiphon.gateway.http.native.schema import GenerateBody
from antiphon.gateway.http.native.write import GenerateReply, GenerateResponseWriter
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.core.meta_info import PersistReply, RankOf
    from antiphon.gateway.http.core.session_requests import SessionRequests
    from antiphon.gateway.sessions import Sessions
    from antiphon.gateway.stream.stream import RequestStream

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """Open a session.

    `capacity_of_str_len` 0 sets no limit; `timeout` is the idle timeout in seconds.
    """

    capacity_of_str_len: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Maximum size of the session, in characters. 0 sets no limit."""
    session_id: Name | None = None
    """Session id chosen by the client. Defaults to a random one."""
    timeout: Annotated[float, Meta(gt=0)] | None = None
    """Idle timeout, in seconds."""

    UNSUPPORTED: ClassVar = {
        "streaming": UnsupportedField(
            "session streaming is not supported: sessions store token ids and hold no cache pages",
            (False,),
        )
    }


class CloseSession(msgspec.Struct, frozen=True):
    """Close a session."""

    session_id: Name
    """Session id."""


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


@dataclass(frozen=True)
class GenerateEndpoints(Endpoints):
    sessions: Sessions
    in_session: SessionRequests
    rank_of: RankOf

    @operation(
        "POST PUT",
        "/generate",
        "Generate text for a prompt. A batch of prompts returns a list.",
        body=GenerateBody,
        reply=GenerateReply | list[GenerateReply],
        examples=_EXAMPLES,
    )
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        parsed, params = await self.response_handler.parse_body(
            request, GenerateBody, lambda body: (parse_generate(body), body.session_params)
        )
        parsed = await with_reasoning_tokens(parsed, self.tokenizers)
        return await self.in_session.answer(request, parsed, params, self._writer)

    async def _writer(
        self,
        parsed: ParsedGenerateRequest,
        streams: Sequence[RequestStream],
        keep: PersistReply | None,
    ) -> GenerateResponseWriter:
        outputs = GenerateOutputs(
            streams,
            parsed.all_reply_options,
            firsts=await self._first_texts(parsed, streams),
            rank_of=self.rank_of,
            weight_version=weight_version(self.runtime),
            persist=keep,
        )
        incremental = self.runtime.settings.gateway.stream_output
        return GenerateResponseWriter(parsed, outputs, incremental=incremental)

    async def _first_texts(
        self, parsed: ParsedGenerateRequest, streams: Sequence[RequestStream]
    ) -> list[str | None]:
        """Return the text of each prompt's first token, if requested: it takes a tokenizer call."""
        named = [
            unpack_ids(stream.submit.prompt_ids[:4])
            for stream, options in zip(streams, parsed.all_reply_options, strict=True)
            if options.needs_first_text
        ]
        texts = iter(
            await self.tokenizers.decode(named, skip_special_tokens=False) if named else ()
        )
        return [
            next(texts) if options.needs_first_text else None
            for options in parsed.all_reply_options
        ]

    @operation(
        "POST",
        "/open_session",
        "Open a session, usable at every gateway. Returns the session id.",
        body=OpenSession,
        reply=str,
        examples=({"capacity_of_str_len": 1000},),
    )
    async def _open(self, request: web.Request) -> web.Response:
        body = await self.response_handler.parse_body(request, OpenSession, lambda body: body)
        name = await self.sessions.open(
            tenant_of(request), body.session_id, body.capacity_of_str_len, body.timeout
        )
        return web.json_response(name)

    @operation(
        "POST",
        "/close_session",
        "Close a session and abort its running requests.",
        body=CloseSession,
        examples=({"session_id": "mine"},),
    )
    async def _close(self, request: web.Request) -> web.Response:
        body = await self.response_handler.small_body(request, CloseSession)
        await self.sessions.close(tenant_of(request), body.session_id)
        return web.Response()
