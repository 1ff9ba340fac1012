"""/v1/classify: labels of texts and their probabilities."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.core.fields import EMBEDDING
from antiphon.gateway.http.core.operation import Operation, json_reply
from antiphon.gateway.http.core.pooling import sigmoid
from antiphon.gateway.http.core.writer import total_usage
from antiphon.gateway.http.openai.embeddings import Input, PoolingBody, prompts_of
from antiphon.gateway.http.openai.replies import UsageBody, usage_body
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


class ClassifyBody(PoolingBody, frozen=True, kw_only=True):
    """Classify each input."""

    input: Input
    """Text or token ids to process, or a list of up to 2048 of either."""


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


@dataclass(frozen=True)
class ClassifyEndpoints:
    response_handler: ResponseHandler
    vectors: PoolingHandler
    model: ModelName

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/classify",
                self._classify,
                "Classify texts. Requires a classification model.",
                body=ClassifyBody,
                reply=ClassifyReply,
                unsupported=EMBEDDING,
                examples=({"input": "Good!"}, {"input": ["Good!", "Bad!"]}),
            ),
        ]

    async def _classify(self, request: web.Request) -> web.Response:
        card = await self.vectors.scorer("classify")
        gen_requests = await self.response_handler.parse_body(
            request, ClassifyBody, _texts, EMBEDDING
        )
        scored = await self.vectors.collect(request, gen_requests)
        return json_reply(
            ClassifyReply(
                id=f"classify-{new_request_id()}",
                created=int(time.time()),
                model=self.model,
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
    return body.requests(prompts, api="classify", field="input", pool=PoolParams())


def _classified(index: int, scored: Pooled, card: PoolingCard) -> ClassifyResult:
    probs = probabilities(scored.numbers, several=card.several)
    label = card.labels[probs.index(max(probs))]
    return ClassifyResult(index=index, label=label, probs=probs, num_classes=len(probs))
