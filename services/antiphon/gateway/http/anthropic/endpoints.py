"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.anthropic.parse import (
    ParsedMessagesRequest,
    ignored_field_warnings,
    parse_count,
    parse_messages,
)
from antiphon.gateway.http.anthropic.schema import CountBody, CountReply, MessageReply, MessagesBody
from antiphon.gateway.http.anthropic.write import MessagesResponseWriter
from antiphon.gateway.http.core.app import warn
from antiphon.gateway.http.core.chat import with_end_token, with_thinking_budget
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.operation import json_reply
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.stream.stream import RequestStream

_VERSION_HEADER = "anthropic-version"
_VERSIONS = ("2023-06-01", "2026-10-21")
"""They differ in what Anthropic's models reject. Sampling parameters are accepted in both."""

_ASKED = [{"role": "user", "content": "What is 2 + 3?"}]
_HELLO: dict[str, object] = {"max_tokens": 8, "messages": _ASKED}
_TOOL = {"name": "add", "input_schema": {"type": "object", "description": "Two numbers."}}
_FORM = {"type": "json_schema", "schema": {"type": "object"}}


class MessagesEndpoints(Endpoints):
    @operation(
        "POST",
        "/v1/messages",
        "Create a message.",
        body=MessagesBody,
        reply=MessageReply,
        examples=(
            _HELLO,
            _HELLO | {"stream": True, "stop_sequences": ["!"], "system": "Be brief."},
            _HELLO | {"tools": [_TOOL], "tool_choice": {"type": "any"}},
            _HELLO | {"output_config": {"format": _FORM}, "temperature": 0},
        ),
    )
    async def _answer(self, request: web.Request) -> web.StreamResponse:
        formats = await self.tokenizers.formats()

        def make(body: MessagesBody) -> ParsedMessagesRequest:
            _check_version(request)
            return parse_messages(body, formats)

        parsed = await self.response_handler.parse_body(
            request, MessagesBody, make, warns_beyond=MessagesBody
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

    @operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the input tokens of a message.",
        body=CountBody,
        reply=CountReply,
        examples=({"messages": _ASKED, "system": "Be brief."},),
    )
    async def _count(self, request: web.Request) -> web.Response:
        formats = await self.tokenizers.formats()

        def make(body: CountBody) -> tuple[GenerationRequest, list[str]]:
            _check_version(request)
            warnings = ignored_field_warnings(body)
            return parse_count(body, formats), warnings

        gen_request, warnings = await self.response_handler.parse_body(
            request, CountBody, make, warns_beyond=MessagesBody
        )
        warn(request, warnings)
        return json_reply(CountReply(await self.count_tokens(request, gen_request)))


def _check_version(request: web.Request) -> None:
    version = request.headers.get(_VERSION_HEADER)
    if version is not None and version not in _VERSIONS:
        text = f"'{version}' is not supported; use {' or '.join(_VERSIONS)}"
        raise InvalidRequest(text, param=_VERSION_HEADER)
