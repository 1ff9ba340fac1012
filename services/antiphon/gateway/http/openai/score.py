"""POST /v1/score: how likely each of some tokens is to come next.

A causal model is asked for no new tokens, only for what would come next.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import Ids
from antiphon.gateway.http.core.operation import Operation
from antiphon.gateway.http.core.reply import json_reply
from antiphon.gateway.http.core.writer import total_usage
from antiphon.gateway.http.openai import unsupported as refused
from antiphon.gateway.http.openai.parse import model_of
from antiphon.gateway.http.openai.replies import UsageBody, usage_body
from antiphon.gateway.http.openai.schema import PROMPTS_MAX, TokenId
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    SamplingOptions,
    TokenOutputFields,
)
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import NAMED_MAX, TokenOutputParams

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.stream.group import CollectedResponse
    from antiphon.wire.ids import ModelName

_Items = Meta(min_length=1, max_length=PROMPTS_MAX)


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/score. Query and items are texts, or token ids."""

    model: str | None = None
    query: Annotated[str | Ids[TokenId], Meta(description="What stands before each item.")]
    items: Annotated[
        str | Annotated[list[str | Ids[TokenId]], _Items],
        Meta(description="What is scored, one at a time."),
    ]
    label_token_ids: Annotated[
        list[TokenId],
        Meta(min_length=1, max_length=NAMED_MAX, description="Tokens that may come next."),
    ]
    apply_softmax: Annotated[bool | None, Meta(description="The scores of an item sum to 1.")] = (
        None
    )
    item_first: Annotated[bool | None, Meta(description="The item stands before the query.")] = None
    temperature: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        Meta(description="Divides the log-probabilities before the softmax."),
    ] = None


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """The score of each label token, item by item."""

    object: str = "scoring"
    scores: list[list[float]]
    model: str
    usage: UsageBody


class ScoreEndpoints:
    """Scores by the log-probabilities of one place."""

    def __init__(self, response_handler: ResponseHandler, model: ModelName) -> None:
        self._response_handler = response_handler
        self._model = model

    def operations(self) -> list[Operation]:
        """Scores."""
        return [
            Operation(
                method="POST",
                path="/v1/score",
                handler=self._score,
                summary="How likely each label token is to come after each item.",
                body=ScoreBody,
                reply=ScoreReply,
                unsupported=refused.SCORE,
                examples=(
                    {
                        "query": "Is this a colour? ",
                        "items": ["red", "dog"],
                        "label_token_ids": [5, 6],
                        "apply_softmax": True,
                    },
                ),
            ),
        ]

    async def _score(self, request: web.Request) -> web.Response:
        body = await self._response_handler.parse_body(request, ScoreBody, _checked, refused.SCORE)
        answers = await self._response_handler.collect(request, _asks(body))
        usages = [answer.usage for answer in answers]
        return json_reply(
            ScoreReply(
                scores=[_scores(answer, body) for answer in answers],
                model=self._model,
                usage=usage_body(total_usage(usages)),
            )
        )


def _checked(body: ScoreBody) -> ScoreBody:
    ids = isinstance(body.query, list)
    items = [body.items] if isinstance(body.items, str) else body.items
    if any(isinstance(item, list) != ids for item in items):
        raise InvalidRequest("query and items are all texts, or all token ids", param="items")
    if len(set(body.label_token_ids)) < len(body.label_token_ids):
        raise InvalidRequest("a token is named twice", param="label_token_ids")
    return body


def _asks(body: ScoreBody) -> list[GenerationRequest]:
    items = [body.items] if isinstance(body.items, str) else body.items
    details = TokenOutputParams(named_ids=tuple(body.label_token_ids))
    gen_requests: list[GenerationRequest] = []
    for item in items:
        first, second = (item, body.query) if body.item_first else (body.query, item)
        gen_requests.append(
            GenerationRequest(
                door="score",
                model=model_of(body.model),
                prompt=first + second
                if isinstance(first, str) and isinstance(second, str)
                else None,
                prompt_ids=(*first, *second)
                if isinstance(first, list) and isinstance(second, list)
                else None,
                prompt_field="items",
                detail_fields=TokenOutputFields(named_ids="label_token_ids"),
                tokens_max=0,
                auto_truncate=False,
                sampling=SamplingOptions(details=details),
            )
        )
    return gen_requests


def _scores(answer: CollectedResponse, body: ScoreBody) -> list[float]:
    piece = answer.choices[0].details
    assert piece is not None, "details were asked for"
    *_, last = piece.details.iter_tokens()
    if not body.apply_softmax:
        return [math.exp(logprob) for logprob in last.named]
    scaled = [logprob / (body.temperature or 1.0) for logprob in last.named]
    highest = max(scaled)
    if highest == -math.inf:
        return [1.0 / len(scaled)] * len(scaled)
    weights = [math.exp(value - highest) for value in scaled]
    return [weight / sum(weights) for weight in weights]
