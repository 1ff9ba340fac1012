"""`embed.<model>`: vectors and scores for NATS clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from antiphon.gateway.nats.inbox import TIMEOUT_MAX_S, authenticate
from antiphon.gateway.owner.actions import TextDelta
from antiphon.gateway.requests.generation_request import GenerationRequest
from antiphon.gateway.requests.pooling import (
    Pooled,
    Prompt,
    pool_params,
    pooled_vector,
    wrong_model,
)
from antiphon.gateway.requests.tokenizer_client import CARD_TIMEOUT_S
from antiphon.gateway.stream.stream import CollectedResponse
from antiphon.service.endpoint import Endpoint, RequestEndpoint
from antiphon.wire.base import Usage
from antiphon.wire.errors import InvalidRequest, UnknownModel
from antiphon.wire.generate import EmbedReply, EmbedRequest
from antiphon.wire.namespaces import cache_salt
from antiphon.wire.routes import EMBED
from antiphon.wire.sampling import PoolParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.bus.bus import Delivery
    from antiphon.gateway.requests.submission import BodyScope, Submission
    from antiphon.wire.ids import TenantId
    from antiphon.wire.tokenize import PoolingCard

VECTORS_BYTES_MAX = 512 * 1024
"""Maximum size of the vectors of a reply: as base64 in JSON they fit into a message."""

_NUMBER_BYTES = 4


@dataclass(frozen=True)
class NatsEmbeddingEndpoints:
    """Replies to each request once: nothing is retried by key or resumed."""

    submission: Submission

    def endpoints(self) -> Sequence[Endpoint]:
        return [
            RequestEndpoint(route=EMBED, handler=self._embed, address={"model": name})
            for name in self.submission.served
        ]

    async def _embed(self, request: EmbedRequest, delivery: Delivery) -> EmbedReply:
        submission = self.submission
        tenant = authenticate(submission, request.api_key, delivery)
        with submission.metrics.count_rejections(tenant):
            submission.access.count_request(tenant)
            if request.model not in submission.served:
                raise UnknownModel.of(request.model, submission.served)
            card = (await submission.tokenizers.card(CARD_TIMEOUT_S)).pooling
            gen_requests = _requests(request, card, tenant)
        with submission.body(gen_requests) as body:
            pooled = await submission.pool_each(gen_requests, partial(self._collect, body), tenant)
        return EmbedReply(
            model=submission.served[0],
            vectors=tuple(each.vector for each in pooled),
            labels=card.labels if card is not None else (),
            usage=Usage(
                prompt_tokens=sum(each.usage.prompt_tokens for each in pooled),
                cached_tokens=sum(each.usage.cached_tokens for each in pooled),
            ),
        )

    async def _collect(self, body: BodyScope, gen_request: GenerationRequest) -> Pooled:
        stream = await self.submission.submit(gen_request, body)
        try:
            collected = CollectedResponse(stream)
            while stream.ended is None or stream.has_events:
                for event in await stream.get():
                    collected.add(event)
                    if isinstance(event, TextDelta):
                        self.submission.driver.mark_consumed(stream, event)
            if stream.ended.error is not None:
                raise stream.ended.error
            return pooled_vector(collected)
        finally:
            self.submission.release(stream)


def _requests(
    request: EmbedRequest, card: PoolingCard | None, tenant: TenantId
) -> list[GenerationRequest]:
    if card is None:
        raise wrong_model("embed", card)
    prompts = _prompts(request)
    pairs = request.pairs or (None,) * len(prompts)
    if len(pairs) != len(prompts):
        raise InvalidRequest.at("pairs", f"{len(pairs)} second texts for {len(prompts)} texts")
    if request.pairs is not None and request.prompt_ids is not None:
        raise InvalidRequest.at("pairs", "requires texts, not prompt_ids")
    if request.timeout_s is not None and request.timeout_s > TIMEOUT_MAX_S:
        raise InvalidRequest.at("timeout_s", f"must be at most {TIMEOUT_MAX_S:g}")
    pool = PoolParams() if card.scores else pool_params(card, request.dimensions)
    if card.scores and request.dimensions is not None:
        raise InvalidRequest.at("dimensions", "not supported for scores")
    fit = VECTORS_BYTES_MAX // (_NUMBER_BYTES * (pool.dimensions or card.width))
    if len(prompts) > fit:
        field = "texts" if request.texts is not None else "prompt_ids"
        text = f"there are {len(prompts)}; at most {fit} vectors of this model fit into one reply"
        raise InvalidRequest.at(field, text)
    return [
        GenerationRequest(
            api="embed",
            model=request.model,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=None if isinstance(prompt, str) else prompt,
            text_pair=pair,
            tokens_max=0,
            pooling=pool,
            cache_salt=cache_salt(request.cache_salt),
            priority=request.priority,
            timeout_s=request.timeout_s,
            tenant=tenant,
            traceparent=request.traceparent,
        )
        for prompt, pair in zip(prompts, pairs, strict=True)
    ]


def _prompts(request: EmbedRequest) -> Sequence[Prompt]:
    if (request.texts is None) == (request.prompt_ids is None):
        raise InvalidRequest("exactly one of texts and prompt_ids is required", param="texts")
    for index, text in enumerate(request.texts or ()):
        if not text.strip():
            raise InvalidRequest.at("texts", f"text {index} is empty or white space")
    return request.texts or request.prompt_ids or ()
