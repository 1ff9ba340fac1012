"""/api/chat and /api/generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.chat import with_end_token
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.core.writer import NDJSON
from antiphon.gateway.http.ollama.parse import model_of, parse_chat, parse_generate
from antiphon.gateway.http.ollama.schema import (
    OLLAMA_CHAT_UNSUPPORTED,
    OLLAMA_GENERATE_UNSUPPORTED,
    OllamaChatBody,
    OllamaChatReply,
    OllamaGenerateBody,
    OllamaGenerateReply,
)
from antiphon.gateway.http.ollama.write import (
    OllamaPiece,
    OllamaResponseWriter,
    chat_reply,
    generate_reply,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.http.ollama.parse import ParsedOllamaRequest
    from antiphon.gateway.http.ollama.schema import OllamaBody
    from antiphon.gateway.http.ollama.write import ReplyFormat
    from antiphon.gateway.stream.stream import RequestStream


_HELLO = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}


class OllamaGenerationEndpoints(Endpoints):
    @operation(
        "POST",
        "/api/chat",
        "Generate the assistant's reply to a conversation.",
        body=OllamaChatBody,
        reply=OllamaChatReply,
        streamed_as=NDJSON,
        unsupported=OLLAMA_CHAT_UNSUPPORTED,
        examples=(
            _HELLO,
            _HELLO | {"stream": False, "format": "json", "options": {"num_predict": 32}},
            _HELLO | {"logprobs": True, "top_logprobs": 2, "options": {"temperature": 0}},
            {"messages": []},
        ),
    )
    async def _chat(self, request: web.Request) -> web.StreamResponse:
        formats = await self.tokenizers.formats()
        body, parsed = await self.response_handler.parse_body(
            request,
            OllamaChatBody,
            lambda body: (body, parse_chat(body, formats, self.served)),
            OLLAMA_CHAT_UNSUPPORTED,
        )
        return await self._answer(request, body, parsed, chat_reply)

    @operation(
        "POST",
        "/api/generate",
        "Generate text for a prompt.",
        body=OllamaGenerateBody,
        reply=OllamaGenerateReply,
        streamed_as=NDJSON,
        unsupported=OLLAMA_GENERATE_UNSUPPORTED,
        examples=(
            {"prompt": "What is 2 + 3?", "system": "Be brief.", "stream": False},
            {"prompt": "Once upon a time", "raw": True, "options": {"num_predict": 8}},
        ),
    )
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        formats = await self.tokenizers.formats()
        body, parsed = await self.response_handler.parse_body(
            request,
            OllamaGenerateBody,
            lambda body: (body, parse_generate(body, formats, self.served)),
            OLLAMA_GENERATE_UNSUPPORTED,
        )
        return await self._answer(request, body, parsed, generate_reply)

    async def _answer(
        self,
        request: web.Request,
        body: OllamaBody,
        parsed: ParsedOllamaRequest | None,
        reply: ReplyFormat,
    ) -> web.StreamResponse:
        if parsed is None:
            return self._loaded(body, reply)
        gen_request = await with_end_token(parsed.gen_request, self.tokenizers)

        async def writer(streams: Sequence[RequestStream]) -> ResponseWriter:
            return OllamaResponseWriter(body.model or self.model, streams[0], parsed, reply)

        return await self.response_handler.answer(
            request, [gen_request], writer, streamed=parsed.stream
        )

    def _loaded(self, body: OllamaBody, reply: ReplyFormat) -> web.Response:
        """Respond to a request that only checks that the model is loaded."""
        self.check_model(model_of(body.model, self.served))
        loaded = reply(body.model or self.model, OllamaPiece())
        return json_reply(msgspec.structs.replace(loaded, done=True, done_reason="load"))
