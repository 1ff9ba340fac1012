"""/v1/classify: labels of texts and their probabilities."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.operation import Operation
from antiphon.gateway.http.core.pooling import pooling_requests, sigmoid
from antiphon.gateway.http.core.reply import json_reply
from antiphon.gateway.http.core.sampling import Rid
from antiphon.gateway.http.core.unsupported import EMBEDDING
from antiphon.gateway.http.core.writer import total_usage
from antiphon.gateway.http.openai.embeddings import Input, prompts_of
from antiphon.gateway.http.openai.replies import UsageBody, usage_body
from antiphon.wire.digests import CacheSaltText, cache_salt
from antiphon.wire.ids import new_request_id
from antiphon.wire.sampling import PoolParams

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.http.core.pooling import PoolingHandler
    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.pooling import Pooled
    from antiphon.wire.ids import ModelName
    from antiphon.wire.tokenize import PoolingCard


class ClassifyBody(msgspec.Struct, frozen=True, kw_only=True):
    """Classify each input."""

    model: Annotated[str | None, Meta(description="Name of the served model. Optional.")] = None
    input: Annotated[
        Input, Meta(description="Text or token ids to process, or a list of up to 2048 of either.")
    ]
    rid: Annotated[Rid | None, Meta(description="Request id, unique among running requests.")] = (
        None
    )
    cache_salt: Annotated[
        CacheSaltText | None,
        Meta(description="Restricts prefix cache sharing to requests with the same salt."),
    ] = None
    extra_key: Annotated[
        CacheSaltText | None, Meta(description="Like `cache_salt`; both must match.")
    ] = None


class ClassifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The most likely label of an input, and the probability of every label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct, frozen=True, kw_only=True):
    """Labels, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyResult]
    usage: UsageBody


class ClassifyEndpoints:
    """Handler of /v1/classify."""

    def __init__(
        self, response_handler: ResponseHandler, vectors: PoolingHandler, model: ModelName
    ) -> None:
        self._response_handler = response_handler
        self._vectors = vectors
        self._model = model

    def operations(self) -> list[Operation]:
        """Return the operation."""
        return [
            Operation(
                method="POST",
                path="/v1/classify",
                handler=self._classify,
                summary="Classify texts. Requires a classification model.",
                body=ClassifyBody,
                reply=ClassifyReply,
                unsupported=EMBEDDING,
                examples=({"input": "Good!"}, {"input": ["Good!", "Bad!"]}),
            ),
        ]

    async def _classify(self, request: web.Request) -> web.Response:
        card = await self._vectors.scorer("classify")
        gen_requests = await self._response_handler.parse_body(
            request, ClassifyBody, _texts, EMBEDDING
        )
        scored = await self._vectors.collect(request, gen_requests)
        return json_reply(
            ClassifyReply(
                id=f"classify-{new_request_id()}",
                created=int(time.time()),
                model=self._model,
                data=[_classified(index, one, card) for index, one in enumerate(scored)],
                usage=usage_body(total_usage([one.usage for one in scored])),
            )
        )


def probabilities(scores: list[float], *, several: bool) -> list[float]:
    """Label probabilities: softmax, or sigmoid per label for multi-label models."""
    if several or len(scores) == 1:
        return [sigmoid(score) for score in scores]
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _texts(body: ClassifyBody) -> list[GenerationRequest]:
    prompts = prompts_of(body.input, "input")
    return pooling_requests(
        prompts,
        api="classify",
        field="input",
        model=body.model,
        pool=PoolParams(),
        rid=body.rid,
        salt=cache_salt(body.cache_salt, body.extra_key),
    )


def _classified(index: int, scored: Pooled, card: PoolingCard) -> ClassifyResult:
    probs = probabilities(scored.numbers, several=card.several)
    label = card.labels[probs.index(max(probs))]
    return ClassifyResult(index=index, label=label, probs=probs, num_classes=len(probs))
