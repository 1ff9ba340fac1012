"""/v1/score: the probability of given tokens as the next token.

A causal model generates no tokens for it: only the next-token distribution is read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.fields import EMBEDDING, UnsupportedField, model_of
from antiphon.gateway.http.core.limits import Ids
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.core.writer import total_usage
from antiphon.gateway.http.openai.replies import UsageBody, usage_body
from antiphon.gateway.http.openai.schema import PROMPTS_MAX
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    SamplingOptions,
    TokenOutputFields,
)
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import NAMED_MAX, TokenId, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from antiphon.gateway.stream.stream import CollectedResponse

_Items = Meta(min_length=1, max_length=PROMPTS_MAX)


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """Score items by the probability of label tokens. Query and items are texts or token ids."""

    model: str | None = None
    query: str | Ids[TokenId]
    """Text or token ids placed before each item."""
    items: str | Annotated[list[str | Ids[TokenId]], _Items]
    """Items to score, each with its own prompt."""
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=NAMED_MAX)]
    """Token ids whose probabilities as the next token are returned."""
    apply_softmax: bool | None = None
    """Whether to normalize the scores of an item with a softmax, so that they sum to 1."""
    item_first: bool | None = None
    """Whether to place the item before the query."""
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    """Divides the logprobs before the softmax."""


SCORE_UNSUPPORTED: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "return_token_logprobs": UnsupportedField("use /generate for logprobs", (False,)),
    "score_extraction_token": UnsupportedField("only the next token is scored"),
}


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of the label tokens for each item."""

    object: str = "scoring"
    scores: list[list[float]]
    model: str
    usage: UsageBody


class ScoreEndpoints(Endpoints):
    @operation(
        "POST",
        "/v1/score",
        "Score items by the probability of label tokens as the next token.",
        body=ScoreBody,
        reply=ScoreReply,
        unsupported=SCORE_UNSUPPORTED,
        examples=(
            {
                "query": "Is this a colour? ",
                "items": ["red", "dog"],
                "label_token_ids": [5, 6],
                "apply_softmax": True,
            },
        ),
    )
    async def _score(self, request: web.Request) -> web.Response:
        body = await self.response_handler.parse_body(
            request, ScoreBody, _checked, SCORE_UNSUPPORTED
        )
        answers = await self.response_handler.collect(request, _requests(body))
        usages = [answer.usage for answer in answers]
        return json_reply(
            ScoreReply(
                scores=[_scores(answer, body) for answer in answers],
                model=self.model,
                usage=usage_body(total_usage(usages)),
            )
        )


def _checked(body: ScoreBody) -> ScoreBody:
    ids = isinstance(body.query, list)
    items = [body.items] if isinstance(body.items, str) else body.items
    if any(isinstance(item, list) != ids for item in items):
        raise InvalidRequest(
            "query and items must both be texts, or both be token ids", param="items"
        )
    if len(set(body.label_token_ids)) < len(body.label_token_ids):
        raise InvalidRequest.at("label_token_ids", "a token id appears twice")
    return body


def _requests(body: ScoreBody) -> list[GenerationRequest]:
    items = [body.items] if isinstance(body.items, str) else body.items
    details = TokenOutputParams(named_ids=tuple(body.label_token_ids))
    gen_requests: list[GenerationRequest] = []
    for item in items:
        first, second = (item, body.query) if body.item_first else (body.query, item)
        gen_requests.append(
            GenerationRequest(
                api="score",
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
    assert piece is not None, "token outputs were requested"
    *_, last = piece.details.iter_tokens()
    if not body.apply_softmax:
        return [math.exp(logprob) for logprob in last.named]
    scaled = [logprob / (body.temperature or 1.0) for logprob in last.named]
    highest = max(scaled)
    if highest == -math.inf:
        return [1.0 / len(scaled)] * len(scaled)
    weights = [math.exp(value - highest) for value in scaled]
    return [weight / sum(weights) for weight in weights]
