"""/v1/responses, and operations on stored responses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from antiphon.gateway.http.core.app import warn
from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.chat import OutputParser, with_end_token
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.openai.responses.items import TRIES_MAX, truncate_items
from antiphon.gateway.http.openai.responses.parse import (
    ParsedResponsesRequest,
    check_include,
    parse_responses_request,
    prepare_responses_request,
)
from antiphon.gateway.http.openai.responses.schema import (
    InputTokens,
    ItemList,
    ResponseDeleted,
    ResponseReply,
    ResponsesBody,
)
from antiphon.gateway.http.openai.responses.store import (
    PAGE_QUERY,
    ResponseEventLog,
    ResponseStore,
    StoredResponse,
    page_of,
)
from antiphon.gateway.http.openai.responses.write import (
    PersistResponse,
    ResponsesWriter,
    draft,
    stream_error,
)
from antiphon.wire.errors import InvalidRequest, PromptTooLong, UnknownResponse, Unsupported

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp import web

    from antiphon.gateway.http.openai.responses.cipher import ReasoningCipher
    from antiphon.gateway.http.openai.responses.items import Item
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.submission import Submission
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.ids import TenantId


_HELLO = {"input": "What is 2 + 3?"}
_DIGITS_MAX = 9
_ONE = "/v1/responses/{response_id}"


@dataclass(frozen=True)
class ResponsesEndpoints(Endpoints):
    submission: Submission
    records: ResponseStore
    cipher: ReasoningCipher

    @operation(
        "POST",
        "/v1/responses",
        "Create a response.",
        body=ResponsesBody,
        reply=ResponseReply,
        examples=(_HELLO, _HELLO | {"stream": True}, _HELLO | {"store": False}),
    )
    async def _create(self, request: web.Request) -> web.StreamResponse:
        formats = await self.tokenizers.formats()
        parsed = await self._read(request)
        stored = await self.records.should_store(parsed.body)
        items = [*await self._previous_items(tenant_of(request), parsed), *parsed.items]
        if stored:
            self.records.check_size(items)
        shown = items
        tries = TRIES_MAX if parsed.body.truncation == "auto" else 0
        while True:
            try:
                return await self._answer(request, parsed, items, shown, formats, stored=stored)
            except PromptTooLong as error:
                shorter = truncate_items(shown, error) if tries else None
                if shorter is None:
                    raise
                dropped = len(shown) - len(shorter)
                warn(request, [f"input: {dropped} items were dropped to fit the context"])
                shown, tries = shorter, tries - 1

    @operation(
        "POST",
        "/v1/responses/input_tokens",
        "Count the input tokens of a response without creating it.",
        body=ResponsesBody,
        reply=InputTokens,
        examples=(_HELLO,),
    )
    async def _count(self, request: web.Request) -> web.Response:
        formats = await self.tokenizers.formats()
        parsed = await self._read(request)
        items = [*await self._previous_items(tenant_of(request), parsed), *parsed.items]
        gen_request, _ = await self.response_handler.run_in_thread(
            request, lambda: prepare_responses_request(parsed, items, formats)
        )
        return json_reply(InputTokens(input_tokens=await self.count_tokens(request, gen_request)))

    @operation(
        "GET",
        _ONE,
        "Retrieve a stored response.",
        reply=ResponseReply,
        query={
            "include": "Additional output; log probabilities are always included.",
            "stream": "`true` streams the events of a background response.",
            "starting_after": "Sequence number of the event after which the stream starts.",
        },
    )
    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        warn(request, check_include(request.query.getall("include", [])))
        record = await self._stored_response(request)
        if request.query.get("stream") != "true":
            return json_reply(record.response)
        if not record.journal:
            raise Unsupported.at(
                "stream", "only responses created with background and stream can be streamed"
            )
        after = _number(request.query.get("starting_after"))
        journal = ResponseEventLog(self.records, tenant_of(request), record.response.id)
        return await self.response_handler.relay(request, journal.read(after), stream_error)

    @operation("POST", f"{_ONE}/cancel", "Cancel a background response.", reply=ResponseReply)
    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        record = await self._stored_response(request)
        if not record.response.background:
            raise InvalidRequest("only a background response can be cancelled")
        record = await self.records.cancel(tenant_of(request), record, self.submission)
        return json_reply(record.response)

    @operation("DELETE", _ONE, "Delete a stored response.", reply=ResponseDeleted)
    async def _delete(self, request: web.Request) -> web.StreamResponse:
        record = await self._stored_response(request)
        await self.records.cancel(tenant_of(request), record, self.submission)
        await self.records.delete(tenant_of(request), record.response.id)
        return json_reply(ResponseDeleted(id=record.response.id))

    @operation(
        "GET",
        f"{_ONE}/input_items",
        "List the input items of a stored response.",
        reply=ItemList,
        query=PAGE_QUERY,
    )
    async def _input_items(self, request: web.Request) -> web.StreamResponse:
        warn(request, check_include(request.query.getall("include", [])))
        record = await self._stored_response(request)
        return json_reply(page_of(record.items, request.query))

    async def _read(self, request: web.Request) -> ParsedResponsesRequest:
        decrypt = partial(self.cipher.decrypt, tenant_of(request))
        parsed = await self.response_handler.parse_body(
            request, ResponsesBody, lambda body: parse_responses_request(body, decrypt)
        )
        warn(request, parsed.warnings)
        return parsed

    async def _answer(
        self,
        request: web.Request,
        parsed: ParsedResponsesRequest,
        items: list[Item],
        shown: list[Item],
        formats: Formats,
        *,
        stored: bool,
    ) -> web.StreamResponse:
        """Generate a response; `shown` is the part of the conversation that the model sees."""
        tenant = tenant_of(request)
        # The conversation may be long even if this body is short.
        gen_request, parser_options = await self.response_handler.run_in_thread(
            request, lambda: prepare_responses_request(parsed, shown, formats)
        )
        gen_request = await with_end_token(gen_request, self.tokenizers)

        async def writer(streams: Sequence[RequestStream]) -> ResponsesWriter:
            (stream,) = streams
            sampling = stream.submit.sampling
            inside = stream.starts_in_reasoning
            return ResponsesWriter(
                draft(parsed, sampling, model=self.model, now=self._now(), store=stored),
                OutputParser(parser_options, starts_in_reasoning=inside),
                logprobs=parsed.logprobs,
                now=self._now,
                persist=self._persist_function(tenant, parsed, items, stream) if stored else None,
                targets=parsed.tools.targets,
                encrypt=partial(self.cipher.encrypt, tenant) if parsed.include_encrypted else None,
            )

        if parsed.body.background:
            return await self._detach(request, parsed, gen_request, writer)
        return await self.response_handler.answer(
            request, [gen_request], writer, streamed=bool(parsed.body.stream)
        )

    async def _detach(
        self,
        request: web.Request,
        parsed: ParsedResponsesRequest,
        gen_request: GenerationRequest,
        make_writer: Callable[[Sequence[RequestStream]], Awaitable[ResponsesWriter]],
    ) -> web.StreamResponse:
        journal = ResponseEventLog(self.records, tenant_of(request), parsed.id)
        created: asyncio.Future[ResponseReply] = asyncio.get_running_loop().create_future()

        async def begun(streams: Sequence[RequestStream]) -> ResponsesWriter:
            writer = await make_writer(streams)
            await writer.persist()
            created.set_result(writer.response)
            return writer

        write = journal.write if parsed.body.stream else _discard
        await self.response_handler.detach(request, [gen_request], begun, write)
        if parsed.body.stream:
            return await self.response_handler.relay(request, journal.read(-1), stream_error)
        return json_reply(created.result())

    async def _stored_response(self, request: web.Request) -> StoredResponse:
        return await self.records.get(tenant_of(request), request.match_info["response_id"])

    async def _previous_items(self, tenant: TenantId, parsed: ParsedResponsesRequest) -> list[Item]:
        response_id = parsed.body.previous_response_id
        if response_id is None:
            return []
        field = "previous_response_id"
        try:
            record = await self.records.get(tenant, response_id)
        except UnknownResponse as error:
            raise InvalidRequest(f"Previous {error.message}", param=field) from error
        if not record.response.ended:
            raise InvalidRequest.at(field, f"the response '{response_id}' has not ended")
        return [*record.items, *record.response.output]

    def _persist_function(
        self,
        tenant: TenantId,
        parsed: ParsedResponsesRequest,
        items: list[Item],
        stream: RequestStream,
    ) -> PersistResponse:
        """Return the function that stores the response.

        It retries if the response ended in the background.
        """
        background = bool(parsed.body.background)

        async def keep(response: ResponseReply) -> None:
            record = StoredResponse(
                response=response,
                items=items,
                owner=self.runtime.process,
                deadline_unix_ms=stream.submit.deadline_unix_ms,
                journal=background and bool(parsed.body.stream),
            )
            must_store = background and response.ended
            await (self.records.put_with_retry if must_store else self.records.put)(tenant, record)

        return keep

    def _now(self) -> int:
        return self.runtime.clock.unix_ms() // 1000


async def _discard(_: bytes) -> None:
    pass


def _number(text: str | None) -> int:
    """Sequence number after which to start; -1 starts at the beginning."""
    if text is None:
        return -1
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX:
        raise InvalidRequest.at("starting_after", "must be the sequence number of an event")
    return int(text)
