"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.anthropic.parse import (
    ParsedMessagesRequest,
    ignored_field_warnings,
    parse_count,
    parse_messages,
)
from antiphon.gateway.http.anthropic.schema import (
    COUNT_UNSUPPORTED,
    MESSAGES_UNSUPPORTED,
    CountBody,
    CountReply,
    MessageReply,
    MessagesBody,
)
from antiphon.gateway.http.anthropic.write import MessagesResponseWriter
from antiphon.gateway.http.core.app import REQUEST_ID, warn
from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.chat import with_end_token, with_thinking_budget
from antiphon.gateway.http.core.operation import Operation, json_reply
from antiphon.model_card.served_model import served_names
from antiphon.service.clock import deadline_in
from antiphon.wire.codec import id_count
from antiphon.wire.errors import InvalidRequest, UnknownModel
from antiphon.wire.ids import new_request_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName

_VERSION_HEADER = "anthropic-version"
_VERSIONS = ("2023-06-01", "2026-10-21")
"""They differ in what Anthropic's models reject. Sampling parameters are accepted in both."""
_COUNT_S = 30.0

_ASKED = [{"role": "user", "content": "What is 2 + 3?"}]
_HELLO: dict[str, object] = {"max_tokens": 8, "messages": _ASKED}
_TOOL = {"name": "add", "input_schema": {"type": "object", "description": "Two numbers."}}
_FORM = {"type": "json_schema", "schema": {"type": "object"}}


@dataclass(frozen=True)
class MessagesEndpoints:
    response_handler: ResponseHandler
    tokenizers: TokenizerClient
    runtime: Runtime
    model: ModelName

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/messages",
                self._answer,
                "Create a message.",
                body=MessagesBody,
                reply=MessageReply,
                unsupported=MESSAGES_UNSUPPORTED,
                examples=(
                    _HELLO,
                    _HELLO | {"stream": True, "stop_sequences": ["!"], "system": "Be brief."},
                    _HELLO | {"tools": [_TOOL], "tool_choice": {"type": "any"}},
                    _HELLO | {"output_config": {"format": _FORM}, "temperature": 0},
                ),
            ),
            Operation(
                "POST",
                "/v1/messages/count_tokens",
                self._count,
                "Count the input tokens of a message.",
                body=CountBody,
                reply=CountReply,
                unsupported=COUNT_UNSUPPORTED,
                examples=({"messages": _ASKED, "system": "Be brief."},),
            ),
        ]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        formats = await self.tokenizers.formats()

        def make(body: MessagesBody) -> ParsedMessagesRequest:
            _check_version(request)
            return parse_messages(body, formats)

        parsed = await self.response_handler.parse_body(
            request, MessagesBody, make, MESSAGES_UNSUPPORTED, warns_beyond=MessagesBody
        )
        warn(request, parsed.warnings)
        gen_request = await with_end_token(parsed.gen_request, self.tokenizers)
        if parsed.budget is not None:
            gen_request = await with_thinking_budget(
                gen_request,
                parsed.budget,
                gen_request.reasoning.format if gen_request.reasoning else None,
                self.tokenizers,
                param="thinking.budget_tokens",
            )

        async def writer(streams: Sequence[RequestStream]) -> ResponseWriter:
            return MessagesResponseWriter(streams[0], parsed, self.model)

        return await self.response_handler.answer(
            request, (gen_request,), writer, streamed=parsed.stream
        )

    async def _count(self, request: web.Request) -> web.Response:
        formats = await self.tokenizers.formats()

        def make(body: CountBody) -> tuple[GenerationRequest, list[str]]:
            _check_version(request)
            warnings = ignored_field_warnings(body)
            return parse_count(body, formats), warnings

        gen_request, warnings = await self.response_handler.parse_body(
            request, CountBody, make, COUNT_UNSUPPORTED, warns_beyond=MessagesBody
        )
        warn(request, warnings)
        served = served_names(self.runtime.settings)
        if gen_request.model is not None and gen_request.model not in served:
            raise UnknownModel.of(gen_request.model, served)
        request[REQUEST_ID] = request_id = new_request_id()
        deadline = deadline_in(_COUNT_S, self.runtime.clock)
        gen_request = msgspec.structs.replace(gen_request, tenant=tenant_of(request))
        encoded = await self.tokenizers.encode(gen_request, request_id, deadline, None)
        return json_reply(CountReply(id_count(encoded.token_ids)))


def _check_version(request: web.Request) -> None:
    version = request.headers.get(_VERSION_HEADER)
    if version is not None and version not in _VERSIONS:
        text = f"'{version}' is not supported; use {' or '.join(_VERSIONS)}"
        raise InvalidRequest(text, param=_VERSION_HEADER)
