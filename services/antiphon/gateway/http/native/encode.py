"""/encode and /classify: the raw output of embedding and classification models."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.endpoints import operation
from antiphon.gateway.http.core.meta_info import FinishBody, weight_version
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.core.pooling import (
    INPUTS_MAX,
    PoolingEndpoints,
    check_not_blank,
    pooling_requests,
)
from antiphon.gateway.http.native.parse import prompts_of
from antiphon.gateway.http.native.schema import EncodeBody
from antiphon.gateway.requests.pooling import Pooled, pool_params
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.namespaces import cache_salt

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.tokenize import PoolingCard


class EncodeMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a vector."""

    id: str
    finish_reason: FinishBody
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int
    weight_version: str
    e2e_latency: float


class EncodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of a text, or its raw scores."""

    embedding: list[float]
    meta_info: EncodeMeta


_encoding = partial(
    operation,
    "POST PUT",
    body=EncodeBody,
    reply=EncodeResult | list[EncodeResult],
    examples=({"text": "Hello"}, {"text": ["One", "Two"]}, {"input_ids": [1, 2]}),
)


class EncodeEndpoints(PoolingEndpoints):
    @_encoding("/encode", "Encode a text to a vector. Several texts return a list.")
    async def _encode(self, request: web.Request) -> web.Response:
        return await self._answer(request, await self.card("embed"), "encode")

    @_encoding(
        "/classify",
        "Score a text with a classification model. Several texts return a list.",
    )
    async def _classify(self, request: web.Request) -> web.Response:
        return await self._answer(request, await self.card("classify", scores=True), "classify")

    async def _answer(self, request: web.Request, card: PoolingCard, api: str) -> web.Response:
        began = time.monotonic()
        gen_requests, batch = await self.response_handler.parse_body(
            request, EncodeBody, lambda body: _requests(body, card, api)
        )
        pooled = await self.pooled(request, gen_requests)
        seconds = time.monotonic() - began
        results = [self._reply(one, seconds) for one in pooled]
        return json_reply(results if batch else results[0])

    def _reply(self, pooled: Pooled, seconds: float) -> EncodeResult:
        return EncodeResult(
            embedding=pooled.numbers,
            meta_info=EncodeMeta(
                id=pooled.id,
                finish_reason=FinishBody(type="length", length=0),
                prompt_tokens=pooled.usage.prompt_tokens,
                cached_tokens=pooled.usage.cached_tokens,
                weight_version=pooled.weights or weight_version(self.runtime),
                e2e_latency=seconds,
            ),
        )


def _requests(
    body: EncodeBody, card: PoolingCard, api: str
) -> tuple[list[GenerationRequest], bool]:
    prompts, batch = prompts_of(body.text, body.input_ids)
    if len(prompts) > INPUTS_MAX:
        raise InvalidRequest(f"at most {INPUTS_MAX} texts are allowed", param="input_ids")
    check_not_blank(prompts, "text")
    gen_requests = pooling_requests(
        prompts,
        api=api,
        field="text" if body.input_ids is None else "input_ids",
        model=None,
        pool=pool_params(card, body.dimensions),
        rid=body.rid,
        priority=body.priority,
        salt=cache_salt(body.cache_salt, body.extra_key),
    )
    return gen_requests, batch
