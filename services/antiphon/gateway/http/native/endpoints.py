"""/generate, and the sessions its requests may belong to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.chat import with_thinking_budget
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
    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.requests.generation_request import GenerationRequest
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
            request,
            GenerateBody,
            lambda body: (parse_generate(body), body.session_params),
        )
        if parsed.budget is not None:
            parsed = await self._budgeted(parsed, parsed.budget)
        if params is not None:
            (gen_request,) = parsed.gen_requests

            async def writer(
                full_request: GenerationRequest,
                streams: Sequence[RequestStream],
                keep: PersistReply,
            ) -> ResponseWriter:
                whole_request = msgspec.structs.replace(parsed, gen_requests=(full_request,))
                return await self._writer(whole_request, streams, keep)

            return await self.in_session.answer(
                request, gen_request, params, writer, streamed=parsed.stream
            )
        return await self.response_handler.answer(
            request, parsed.gen_requests, partial(self._writer, parsed), streamed=parsed.stream
        )

    async def _budgeted(
        self, parsed: ParsedGenerateRequest, tokens_max: int
    ) -> ParsedGenerateRequest:
        formats = await self.tokenizers.formats()
        gen_requests = [
            await with_thinking_budget(
                gen_request,
                tokens_max,
                formats.reasoning,
                self.tokenizers,
                param="max_thinking_tokens",
            )
            for gen_request in parsed.gen_requests
        ]
        return msgspec.structs.replace(parsed, gen_requests=tuple(gen_requests))

    async def _writer(
        self,
        parsed: ParsedGenerateRequest,
        streams: Sequence[RequestStream],
        keep: PersistReply | None = None,
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
