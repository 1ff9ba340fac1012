"""POST /v1/classify: the labels of texts, and how likely each one is."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.gateway.http.openai.bodies import Rid
from antiphon.gateway.http.openai.embeddings import Input, prompts_of
from antiphon.gateway.http.openai.refused import EMBEDDING
from antiphon.gateway.http.openai.replies import UsageBody, usage_body
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.http.pooling import asks_for, sigmoid
from antiphon.gateway.http.reply import json_reply
from antiphon.gateway.http.voice import total
from antiphon.wire.digests import CacheSaltText, cache_salt
from antiphon.wire.ids import new_request_id
from antiphon.wire.sampling import PoolParams

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.http.answering import Answering
    from antiphon.gateway.http.pooling import Vectors
    from antiphon.gateway.pooling import Pooled
    from antiphon.wire.ids import ModelName
    from antiphon.wire.tokenize import PoolingCard


class ClassifyBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/classify."""

    model: Annotated[str | None, Meta(description="The served model; null takes it.")] = None
    input: Annotated[Input, Meta(description="A text or token ids, or up to 2048 of either.")]
    rid: Annotated[Rid | None, Meta(description="The client's name for it.")] = None
    cache_salt: Annotated[
        CacheSaltText | None,
        Meta(description="Cached prefixes are shared with those who say the same."),
    ] = None
    extra_key: Annotated[
        CacheSaltText | None, Meta(description="Likewise; both must be the same.")
    ] = None


class Classified(msgspec.Struct, frozen=True, kw_only=True):
    """The likeliest label of a text, and how likely each one is."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct, frozen=True, kw_only=True):
    """The labels, in the order of the texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: UsageBody


class Classifying:
    """Has texts scored, and tells what the scores mean."""

    def __init__(self, answering: Answering, vectors: Vectors, model: ModelName) -> None:
        self._answering = answering
        self._vectors = vectors
        self._model = model

    def operations(self) -> list[Operation]:
        """Labels of texts."""
        return [
            Operation(
                method="POST",
                path="/v1/classify",
                answer=self._classify,
                summary="The label of each text, of a model that has labels.",
                body=ClassifyBody,
                reply=ClassifyReply,
                refused=EMBEDDING,
                examples=({"input": "Good!"}, {"input": ["Good!", "Bad!"]}),
            ),
        ]

    async def _classify(self, request: web.Request) -> web.Response:
        card = await self._vectors.scorer("classify")
        asks = await self._answering.read(request, ClassifyBody, _texts, EMBEDDING)
        scored = await self._vectors.of(request, asks)
        return json_reply(
            ClassifyReply(
                id=f"classify-{new_request_id()}",
                created=int(time.time()),
                model=self._model,
                data=[_classified(index, one, card) for index, one in enumerate(scored)],
                usage=usage_body(total([one.usage for one in scored])),
            )
        )


def probabilities(scores: list[float], *, several: bool) -> list[float]:
    """How likely each label is: one of all, or each by itself."""
    if several or len(scores) == 1:
        return [sigmoid(score) for score in scores]
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _texts(body: ClassifyBody) -> list[Ask]:
    prompts = prompts_of(body.input, "input")
    return asks_for(
        prompts,
        door="classify",
        field="input",
        model=body.model,
        pool=PoolParams(),
        rid=body.rid,
        salt=cache_salt(body.cache_salt, body.extra_key),
    )


def _classified(index: int, scored: Pooled, card: PoolingCard) -> Classified:
    probs = probabilities(scored.numbers, several=card.several)
    label = card.labels[probs.index(max(probs))]
    return Classified(index=index, label=label, probs=probs, num_classes=len(probs))
