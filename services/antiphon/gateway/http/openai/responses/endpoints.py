"""/v1/responses, and operations on stored responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.app import REQUEST_ID, warn
from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.chat import with_end_token
from antiphon.gateway.http.core.operation import Operation, json_reply
from antiphon.gateway.http.openai.responses.cipher import ReasoningCipher
from antiphon.gateway.http.openai.responses.conversation import TRIES_MAX, truncate_items
from antiphon.gateway.http.openai.responses.events import stream_error
from antiphon.gateway.http.openai.responses.parse import (
    check_include,
    parse_responses_request,
    prepare_responses_request,
)
from antiphon.gateway.http.openai.responses.replies import (
    InputTokens,
    ItemList,
    ResponseDeleted,
    ResponseReply,
)
from antiphon.gateway.http.openai.responses.schema import ResponsesBody
from antiphon.gateway.http.openai.responses.store import (
    PAGE_QUERY,
    ResponseCanceller,
    ResponseEventLog,
    ResponseStore,
    StoredResponse,
    page_of,
)
from antiphon.gateway.http.openai.responses.write import ResponsesWriter, draft
from antiphon.gateway.http.openai.unsupported import RESPONSES
from antiphon.model_card.served_model import served_names
from antiphon.service.clock import deadline_in
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

    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.http.openai.responses.items import Item
    from antiphon.gateway.http.openai.responses.parse import ParsedResponsesRequest
    from antiphon.gateway.http.openai.responses.write import PersistResponse
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.submission import Submission
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName, TenantId

    ResponsesWriterFactory = Callable[[Sequence[RequestStream]], Awaitable[ResponsesWriter]]

_HELLO = {"input": "What is 2 + 3?"}
_DIGITS_MAX = 9
_COUNT_S = 30.0
_ONE = "/v1/responses/{response_id}"


class ResponsesEndpoints:
    def __init__(
        self,
        response_handler: ResponseHandler,
        submission: Submission,
        tokenizers: TokenizerClient,
        runtime: Runtime,
        model: ModelName,
    ) -> None:
        self._response_handler = response_handler
        self._tokenizers = tokenizers
        self._runtime = runtime
        self._model = model
        self._records = ResponseStore(runtime)
        self._cipher = ReasoningCipher(runtime.settings.access)
        self._cancelling = ResponseCanceller(runtime, submission, self._records)

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/responses",
                self._create,
                "Create a response.",
                body=ResponsesBody,
                reply=ResponseReply,
                unsupported=RESPONSES,
                examples=(_HELLO, _HELLO | {"stream": True}, _HELLO | {"store": False}),
            ),
            Operation(
                "POST",
                "/v1/responses/input_tokens",
                self._count,
                "Count the input tokens of a response without creating it.",
                body=ResponsesBody,
                reply=InputTokens,
                unsupported=RESPONSES,
                examples=(_HELLO,),
            ),
            Operation(
                "GET",
                _ONE,
                self._retrieve,
                "Retrieve a stored response.",
                reply=ResponseReply,
                query={
                    "include": "Additional output; log probabilities are always included.",
                    "stream": "`true` streams the events of a background response.",
                    "starting_after": "Sequence number of the event after which the stream starts.",
                },
            ),
            Operation(
                "POST",
                f"{_ONE}/cancel",
                self._cancel,
                "Cancel a background response.",
                reply=ResponseReply,
            ),
            Operation(
                "DELETE", _ONE, self._delete, "Delete a stored response.", reply=ResponseDeleted
            ),
            Operation(
                "GET",
                f"{_ONE}/input_items",
                self._input_items,
                "List the input items of a stored response.",
                reply=ItemList,
                query=PAGE_QUERY,
            ),
        ]

    async def _count(self, request: web.Request) -> web.Response:
        formats = await self._tokenizers.formats()
        parsed = await self._read(request)
        items = [*await self._previous_items(tenant_of(request), parsed), *parsed.items]
        gen_request = (
            await self._response_handler.run_in_thread(
                request, lambda: prepare_responses_request(parsed, items, formats)
            )
        ).gen_request
        served = served_names(self._runtime.settings)
        if gen_request.model is not None and gen_request.model not in served:
            raise UnknownModel.of(gen_request.model, served)
        request[REQUEST_ID] = request_id = new_request_id()
        deadline = deadline_in(_COUNT_S, self._runtime.clock)
        gen_request = msgspec.structs.replace(gen_request, tenant=tenant_of(request))
        try:
            encoded = await self._tokenizers.encode(gen_request, request_id, deadline, None)
        except PromptTooLong as error:
            error.param = gen_request.prompt_field
            raise
        return json_reply(InputTokens(input_tokens=id_count(encoded.token_ids)))

    async def _read(self, request: web.Request) -> ParsedResponsesRequest:
        tenant = tenant_of(request)

        def decrypt(encrypted: str, at: str) -> str:
            return self._cipher.decrypt(encrypted, tenant, at)

        parsed = await self._response_handler.parse_body(
            request, ResponsesBody, lambda body: parse_responses_request(body, decrypt), RESPONSES
        )
        warn(request, parsed.warnings)
        return parsed

    async def _create(self, request: web.Request) -> web.StreamResponse:
        formats = await self._tokenizers.formats()
        tenant, parsed = tenant_of(request), await self._read(request)
        body = parsed.body
        stored = await self._records.should_store(body)
        items = [*await self._previous_items(tenant, parsed), *parsed.items]
        if stored:
            self._records.check_size(items)
        shown = items
        for _ in range(TRIES_MAX if body.truncation == "auto" else 0):
            try:
                return await self._answer(request, parsed, items, shown, formats, stored=stored)
            except PromptTooLong as error:
                shorter = truncate_items(shown, error)
                if shorter is None:
                    raise
                warn(
                    request,
                    [f"input: {len(shown) - len(shorter)} items were dropped to fit the context"],
                )
                shown = shorter
        return await self._answer(request, parsed, items, shown, formats, stored=stored)

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
        body, tenant = parsed.body, tenant_of(request)
        # The conversation may be long even if this body is short.
        asking = await self._response_handler.run_in_thread(
            request, lambda: prepare_responses_request(parsed, shown, formats)
        )
        gen_request = await with_end_token(asking.gen_request, self._tokenizers)

        async def writer(streams: Sequence[RequestStream]) -> ResponsesWriter:
            (stream,) = streams
            return ResponsesWriter(
                draft(
                    parsed,
                    stream.submit.sampling,
                    model=self._model,
                    now=self._now(),
                    store=stored,
                ),
                asking.parser_options,
                starts_in_reasoning=stream.starts_in_reasoning,
                logprobs=parsed.logprobs,
                now=self._now,
                persist=self._persist_function(tenant, parsed, items, stream) if stored else None,
                targets=parsed.tools.targets,
                encrypt=(lambda text: self._cipher.encrypt(text, tenant))
                if parsed.include_encrypted
                else None,
            )

        if body.background:
            return await self._detach(request, parsed, gen_request, writer)
        return await self._response_handler.answer(
            request, [gen_request], writer, streamed=bool(body.stream)
        )

    async def _detach(
        self,
        request: web.Request,
        parsed: ParsedResponsesRequest,
        gen_request: GenerationRequest,
        make_writer: ResponsesWriterFactory,
    ) -> web.StreamResponse:
        """Return the initial response, or its events as they are stored."""
        journal = self._journal(tenant_of(request), parsed.id)

        async def begun(streams: Sequence[RequestStream]) -> ResponsesWriter:
            writer = await make_writer(streams)
            await writer.persist()
            return writer

        write = journal.write if parsed.body.stream else _discard
        writer = await self._response_handler.detach(request, [gen_request], begun, write)
        if parsed.body.stream:
            return await self._response_handler.relay(
                request, journal.read(self._records, -1), stream_error
            )
        assert isinstance(writer, ResponsesWriter), "created for this request"
        return json_reply(writer.response)

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        warn(request, check_include(request.query.getall("include", [])))
        record = await self._stored_response(request)
        if request.query.get("stream") != "true":
            return json_reply(record.response)
        if not record.journal:
            raise Unsupported.at(
                "stream", "only responses created with background and stream can be streamed"
            )
        journal = self._journal(tenant_of(request), record.response.id)
        after = _number(request.query.get("starting_after"))
        return await self._response_handler.relay(
            request, journal.read(self._records, after), stream_error
        )

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        record = await self._stored_response(request)
        if not record.response.background:
            raise InvalidRequest("only a background response can be cancelled")
        record = await self._cancelling.cancel(tenant_of(request), record)
        return json_reply(record.response)

    async def _input_items(self, request: web.Request) -> web.StreamResponse:
        warn(request, check_include(request.query.getall("include", [])))
        record = await self._stored_response(request)
        return json_reply(page_of(record.items, request.query))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        record = await self._stored_response(request)
        await self._cancelling.cancel(tenant_of(request), record)
        await self._records.delete(tenant_of(request), record.response.id)
        return json_reply(ResponseDeleted(id=record.response.id))

    async def _stored_response(self, request: web.Request) -> StoredResponse:
        return await self._records.get(tenant_of(request), request.match_info["response_id"])

    async def _previous_items(self, tenant: TenantId, parsed: ParsedResponsesRequest) -> list[Item]:
        response_id = parsed.body.previous_response_id
        if response_id is None:
            return []
        field = "previous_response_id"
        try:
            record = await self._records.get(tenant, response_id)
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
                owner=self._runtime.process,
                deadline_unix_ms=stream.submit.deadline_unix_ms,
                journal=background and bool(parsed.body.stream),
            )
            must_store = background and response.ended
            await (self._records.put_with_retry if must_store else self._records.put)(
                tenant, record
            )

        return keep

    def _journal(self, tenant: TenantId, response_id: str) -> ResponseEventLog:
        return ResponseEventLog(self._records.store, self._runtime.clock, tenant, response_id)

    def _now(self) -> int:
        return self._runtime.clock.unix_ms() // 1000


async def _discard(_: bytes) -> None:
    pass


def _number(text: str | None) -> int:
    """Sequence number after which to start; -1 starts at the beginning."""
    if text is None:
        return -1
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX:
        raise InvalidRequest.at("starting_after", "must be the sequence number of an event")
    return int(text)
