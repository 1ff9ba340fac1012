"""/api/chat, /api/generate and /api/embed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.chat import with_end_token
from antiphon.gateway.http.core.endpoints import operation
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.core.pooling import PoolingEndpoints, check_not_blank, pooling_requests
from antiphon.gateway.http.core.writer import NDJSON, ResponseWriter
from antiphon.gateway.http.ollama.parse import (
    ParsedOllamaRequest,
    model_of,
    parse_chat,
    parse_generate,
    tagged,
)
from antiphon.gateway.http.ollama.schema import (
    OllamaBody,
    OllamaChatBody,
    OllamaChatReply,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaEmbeddingReply,
    OllamaEmbedReply,
    OllamaGenerateBody,
    OllamaGenerateReply,
)
from antiphon.gateway.http.ollama.write import (
    OllamaPiece,
    OllamaResponseWriter,
    chat_reply,
    generate_reply,
)
from antiphon.gateway.requests.pooling import Prompt, pool_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.http.ollama.write import ReplyFormat
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.tokenize import PoolingCard


_HELLO = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}


class OllamaEndpoints(PoolingEndpoints):
    @operation(
        "POST",
        "/api/chat",
        "Generate the assistant's reply to a conversation.",
        body=OllamaChatBody,
        reply=OllamaChatReply,
        streamed_as=NDJSON,
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
            request, OllamaChatBody, lambda body: (body, parse_chat(body, formats, self.served))
        )
        return await self._answer(request, body, parsed, chat_reply)

    @operation(
        "POST",
        "/api/generate",
        "Generate text for a prompt.",
        body=OllamaGenerateBody,
        reply=OllamaGenerateReply,
        streamed_as=NDJSON,
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

    @operation(
        "POST",
        "/api/embed",
        "Create embedding vectors. Requires an embedding model.",
        body=OllamaEmbedBody,
        reply=OllamaEmbedReply,
        examples=({"input": "Hello"}, {"input": ["One", "Two"], "truncate": False}),
    )
    async def _embed(self, request: web.Request) -> web.Response:
        began = time.monotonic()
        card = await self.card("embed", scores=False)
        gen_requests = await self.response_handler.parse_body(
            request, OllamaEmbedBody, lambda body: self._requests(body, card)
        )
        pooled = await self.pooled(request, gen_requests)
        return json_reply(
            OllamaEmbedReply(
                model=tagged(self.served[0]),
                embeddings=[one.numbers for one in pooled],
                total_duration=int((time.monotonic() - began) * 1e9),
                prompt_eval_count=sum(one.usage.prompt_tokens for one in pooled),
            )
        )

    @operation(
        "POST",
        "/api/embeddings",
        "Create an embedding vector. Requires an embedding model. Deprecated: use /api/embed.",
        body=OllamaEmbeddingBody,
        reply=OllamaEmbeddingReply,
        examples=({"prompt": "Hello"},),
        deprecated=True,
    )
    async def _embed_one(self, request: web.Request) -> web.Response:
        card = await self.card("embed", scores=False)
        gen_requests = await self.response_handler.parse_body(
            request, OllamaEmbeddingBody, lambda body: self._requests(body, card)
        )
        (pooled,) = await self.pooled(request, gen_requests)
        return json_reply(OllamaEmbeddingReply(pooled.numbers))

    def _requests(
        self, body: OllamaEmbedBody | OllamaEmbeddingBody, card: PoolingCard
    ) -> list[GenerationRequest]:
        if isinstance(body, OllamaEmbeddingBody):
            field, given, dimensions, truncate = "prompt", body.prompt, None, None
        else:
            field, given, dimensions = "input", body.input, body.dimensions
            truncate = body.truncate
        prompts: list[Prompt] = [given] if isinstance(given, str) else [*given]
        check_not_blank(prompts, field)
        gen_requests = pooling_requests(
            prompts,
            api="ollama",
            field=field,
            model=model_of(body.model, self.served),
            pool=pool_params(card, dimensions),
        )
        if truncate is not False:
            return gen_requests
        return [
            msgspec.structs.replace(gen_request, auto_truncate=False)
            for gen_request in gen_requests
        ]
