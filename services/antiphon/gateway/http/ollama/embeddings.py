"""/api/embed, and its older form /api/embeddings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.endpoints import operation
from antiphon.gateway.http.core.limits import Json
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.core.pooling import (
    INPUTS_MAX,
    PoolingEndpoints,
    check_not_blank,
    pooling_requests,
)
from antiphon.gateway.http.ollama.parse import model_of, tagged
from antiphon.gateway.http.ollama.schema import OLLAMA_EMBED_UNSUPPORTED
from antiphon.gateway.requests.pooling import pool_params
from antiphon.wire.sampling import Dimensions

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.pooling import Prompt
    from antiphon.wire.tokenize import PoolingCard


class _OllamaEmbedBase(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    """Name of the served model. Optional."""
    options: Json | None = None
    """Accepted and ignored: no tokens are sampled."""
    keep_alive: str | float | None = None
    """Accepted and ignored: the model stays loaded."""


class OllamaEmbedBody(_OllamaEmbedBase, frozen=True, kw_only=True):
    """Create an embedding vector for each input."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)]
    """Text to embed, or a list of texts."""
    dimensions: Dimensions | None = None
    """Number of leading dimensions to return, for Matryoshka models."""
    truncate: bool | None = None
    """Whether to truncate a text that is too long. Only false is supported."""


class OllamaEmbeddingBody(_OllamaEmbedBase, frozen=True, kw_only=True):
    """Create an embedding vector for one text."""

    prompt: str
    """Text to embed."""


class OllamaEmbedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding vectors, in the order of the inputs. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingReply(msgspec.Struct, frozen=True):
    """One embedding vector."""

    embedding: list[float]


class OllamaEmbeddingEndpoints(PoolingEndpoints):
    @operation(
        "POST",
        "/api/embed",
        "Create embedding vectors. Requires an embedding model.",
        body=OllamaEmbedBody,
        reply=OllamaEmbedReply,
        unsupported=OLLAMA_EMBED_UNSUPPORTED,
        examples=({"input": "Hello"}, {"input": ["One", "Two"], "truncate": False}),
    )
    async def _embed(self, request: web.Request) -> web.Response:
        began = time.monotonic()
        card = await self.embedder()
        gen_requests = await self.response_handler.parse_body(
            request,
            OllamaEmbedBody,
            lambda body: self._requests(body, card),
            OLLAMA_EMBED_UNSUPPORTED,
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
        card = await self.embedder()
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
