"""POST /v1/responses, and what can be done with responses that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.guard import tenant_of
from antiphon.gateway.http.openai.marks import marked
from antiphon.gateway.http.openai.responses.bodies import ResponsesBody
from antiphon.gateway.http.openai.responses.cancelling import Cancelling
from antiphon.gateway.http.openai.responses.drafts import draft
from antiphon.gateway.http.openai.responses.events import broken
from antiphon.gateway.http.openai.responses.journal import Journal
from antiphon.gateway.http.openai.responses.paging import QUERY, page_of
from antiphon.gateway.http.openai.responses.reading import asked, check_include, said
from antiphon.gateway.http.openai.responses.records import Record, Records
from antiphon.gateway.http.openai.responses.refused import RESPONSES
from antiphon.gateway.http.openai.responses.replies import (
    InputTokens,
    ItemList,
    ResponseDeleted,
    ResponseReply,
)
from antiphon.gateway.http.openai.responses.seals import Seals
from antiphon.gateway.http.openai.responses.shortening import TRIES_MAX, shortened
from antiphon.gateway.http.openai.responses.voice import ResponseVoice
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.http.reply import json_reply
from antiphon.gateway.http.server import REQUEST_ID, warn
from antiphon.gateway.parsing.formats import formats_of
from antiphon.service.deadline import deadline_in
from antiphon.service.model import served_names
from antiphon.wire.codec import id_count
from antiphon.wire.errors import (
    InvalidRequest,
    PromptTooLong,
    UnknownModel,
    UnknownResponse,
    Unsupported,
)
from antiphon.wire.ids import new_request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp import web

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.entrance import Entrance
    from antiphon.gateway.http.answering import Answering
    from antiphon.gateway.http.openai.responses.items import Item
    from antiphon.gateway.http.openai.responses.reading import Said
    from antiphon.gateway.http.openai.responses.voice import Keep
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.stream import Stream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName, TenantId

    VoiceOf = Callable[[Sequence[Stream]], Awaitable[ResponseVoice]]

_HELLO = {"input": "What is 2 + 3?"}
_DIGITS_MAX = 9
_COUNT_S = 30.0
_ONE = "/v1/responses/{response_id}"


class Responses:
    """Reads, gives each answer its voice, and finds what is kept."""

    def __init__(
        self,
        answering: Answering,
        entrance: Entrance,
        tokenizers: TokenizerCalls,
        runtime: Runtime,
        model: ModelName,
    ) -> None:
        self._answering = answering
        self._tokenizers = tokenizers
        self._runtime = runtime
        self._model = model
        self._records = Records(runtime)
        self._seals = Seals(runtime.settings.access)
        self._cancelling = Cancelling(runtime, entrance, self._records)

    def operations(self) -> list[Operation]:
        """Making them, and what can be done with one."""
        return [
            Operation(
                method="POST",
                path="/v1/responses",
                answer=self._create,
                summary="The model's answer to a conversation, as items.",
                body=ResponsesBody,
                reply=ResponseReply,
                refused=RESPONSES,
                examples=(_HELLO, _HELLO | {"stream": True}, _HELLO | {"store": False}),
            ),
            Operation(
                method="POST",
                path="/v1/responses/input_tokens",
                answer=self._count,
                summary="How many tokens the model would read for a response.",
                body=ResponsesBody,
                reply=InputTokens,
                refused=RESPONSES,
                examples=(_HELLO,),
            ),
            Operation(
                method="GET",
                path=_ONE,
                answer=self._retrieve,
                summary="A response that is kept.",
                reply=ResponseReply,
                query={
                    "include": "Additional output; log probabilities are always included.",
                    "stream": "`true` streams the events of a background response.",
                    "starting_after": "Sequence number of the event after which the stream starts.",
                },
            ),
            Operation(
                method="POST",
                path=f"{_ONE}/cancel",
                answer=self._cancel,
                summary="Ends a response that is made in the background.",
                reply=ResponseReply,
            ),
            Operation(
                method="DELETE",
                path=_ONE,
                answer=self._delete,
                summary="Keeps a response no longer.",
                reply=ResponseDeleted,
            ),
            Operation(
                method="GET",
                path=f"{_ONE}/input_items",
                answer=self._input_items,
                summary="The conversation that a response was made from.",
                reply=ItemList,
                query=QUERY,
            ),
        ]

    async def _count(self, request: web.Request) -> web.Response:
        formats = await formats_of(
            self._runtime.settings.gateway, self._tokenizers.card, self._tokenizers.writes
        )
        heard = await self._read(request)
        items = [*await self._before(tenant_of(request), heard), *heard.items]
        ask = (await self._answering.apart(request, lambda: asked(heard, items, formats))).ask
        served = served_names(self._runtime.settings)
        if ask.model is not None and ask.model not in served:
            raise UnknownModel.of(ask.model, served)
        request[REQUEST_ID] = request_id = new_request_id()
        deadline = deadline_in(_COUNT_S, self._runtime.clock)
        ask = msgspec.structs.replace(ask, tenant=tenant_of(request))
        try:
            encoded = await self._tokenizers.encode(ask, request_id, deadline, None)
        except PromptTooLong as error:
            error.param = ask.prompt_field
            raise
        return json_reply(InputTokens(input_tokens=id_count(encoded.token_ids)))

    async def _read(self, request: web.Request) -> Said:
        tenant = tenant_of(request)

        def unsealed(sealed: str, at: str) -> str:
            return self._seals.open(sealed, tenant, at)

        heard = await self._answering.read(
            request, ResponsesBody, lambda body: said(body, unsealed), RESPONSES
        )
        warn(request, heard.warnings)
        return heard

    async def _create(self, request: web.Request) -> web.StreamResponse:
        formats = await formats_of(
            self._runtime.settings.gateway, self._tokenizers.card, self._tokenizers.writes
        )
        tenant, heard = tenant_of(request), await self._read(request)
        body = heard.body
        kept = await self._records.wanted(body)
        items = [*await self._before(tenant, heard), *heard.items]
        if kept:
            self._records.check_size(items)
        shown = items
        for _ in range(TRIES_MAX if body.truncation == "auto" else 0):
            try:
                return await self._answer(request, heard, items, shown, formats, kept=kept)
            except PromptTooLong as error:
                shorter = shortened(shown, error)
                if shorter is None:
                    raise
                warn(request, [f"input: {len(shown) - len(shorter)} items were left out"])
                shown = shorter
        return await self._answer(request, heard, items, shown, formats, kept=kept)

    async def _answer(
        self,
        request: web.Request,
        heard: Said,
        items: list[Item],
        shown: list[Item],
        formats: Formats,
        *,
        kept: bool,
    ) -> web.StreamResponse:
        """Answer a conversation, of which the model is shown a part."""
        body, tenant = heard.body, tenant_of(request)
        # The conversation may be long, whatever the length of this body.
        asking = await self._answering.apart(request, lambda: asked(heard, shown, formats))
        ask = await marked(asking.ask, self._tokenizers)

        async def voice(streams: Sequence[Stream]) -> ResponseVoice:
            (stream,) = streams
            return ResponseVoice(
                self._draft(heard, stream, kept=kept),
                asking.hearing,
                inside=stream.inside,
                logprobs=heard.logprobs,
                now=self._now,
                keep=self._keeping(tenant, heard, items, stream) if kept else None,
                targets=heard.tools.targets,
                seal=(lambda text: self._seals.seal(text, tenant)) if heard.sealed else None,
            )

        if body.background:
            return await self._detach(request, heard, ask, voice)
        return await self._answering.answer(request, [ask], voice, streamed=bool(body.stream))

    async def _detach(
        self, request: web.Request, heard: Said, ask: Ask, voice_of: VoiceOf
    ) -> web.StreamResponse:
        """Return the response as it begins, or its events as they are put by."""
        journal = self._journal(tenant_of(request), heard.id)

        async def begun(streams: Sequence[Stream]) -> ResponseVoice:
            voice = await voice_of(streams)
            await voice.keep()
            return voice

        write = journal.write if heard.body.stream else _nothing
        voice = await self._answering.detach(request, [ask], begun, write)
        if heard.body.stream:
            return await self._answering.relay(request, journal.read(self._records, -1), broken)
        assert isinstance(voice, ResponseVoice), "as it was made"
        return json_reply(voice.response)

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        warn(request, check_include(request.query.getall("include", [])))
        record = await self._found(request)
        if request.query.get("stream") != "true":
            return json_reply(record.response)
        if not record.journal:
            text = "stream: events are kept of responses made with background and stream"
            raise Unsupported(text, param="stream")
        journal = self._journal(tenant_of(request), record.response.id)
        after = _number(request.query.get("starting_after"))
        return await self._answering.relay(request, journal.read(self._records, after), broken)

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        record = await self._found(request)
        if not record.response.background:
            raise InvalidRequest("only a response that is made in the background can be cancelled")
        record = await self._cancelling.cancel(tenant_of(request), record)
        return json_reply(record.response)

    async def _input_items(self, request: web.Request) -> web.StreamResponse:
        warn(request, check_include(request.query.getall("include", [])))
        record = await self._found(request)
        return json_reply(page_of(record.items, request.query))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        record = await self._found(request)
        await self._cancelling.cancel(tenant_of(request), record)
        await self._records.forget(tenant_of(request), record.response.id)
        return json_reply(ResponseDeleted(id=record.response.id))

    async def _found(self, request: web.Request) -> Record:
        return await self._records.find(tenant_of(request), request.match_info["response_id"])

    async def _before(self, tenant: TenantId, heard: Said) -> list[Item]:
        """The conversation that the input goes on from."""
        response_id = heard.body.previous_response_id
        if response_id is None:
            return []
        field = "previous_response_id"
        try:
            record = await self._records.find(tenant, response_id)
        except UnknownResponse as error:
            raise InvalidRequest(f"Previous {error.message}", param=field) from error
        if not record.response.ended:
            text = f"{field}: the response '{response_id}' has not ended"
            raise InvalidRequest(text, param=field)
        return [*record.items, *record.response.output]

    def _draft(self, heard: Said, stream: Stream, *, kept: bool) -> ResponseReply:
        sampling = stream.submit.sampling
        return draft(heard, sampling, model=self._model, now=self._now(), store=kept)

    def _keeping(self, tenant: TenantId, heard: Said, items: list[Item], stream: Stream) -> Keep:
        """What keeps the response as it stands; stubbornly, if it has ended and nobody waits."""
        background = bool(heard.body.background)

        async def keep(response: ResponseReply) -> None:
            record = Record(
                response=response,
                items=items,
                owner=self._runtime.process,
                deadline_unix_ms=stream.submit.deadline_unix_ms,
                journal=background and bool(heard.body.stream),
            )
            insists = background and response.ended
            await (self._records.insist if insists else self._records.keep)(tenant, record)

        return keep

    def _journal(self, tenant: TenantId, response_id: str) -> Journal:
        return Journal(self._records.store, self._runtime.clock, tenant, response_id)

    def _now(self) -> int:
        return self._runtime.clock.unix_ms() // 1000


async def _nothing(_: bytes) -> None:
    """Whoever waits for nothing is told nothing."""


def _number(text: str | None) -> int:
    """The event to begin behind; -1: the beginning."""
    if text is None:
        return -1
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX:
        raise InvalidRequest("starting_after: the number of an event", param="starting_after")
    return int(text)
