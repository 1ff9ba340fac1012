"""/v1/score and /v1/rerank: scores of items, and documents sorted by their relevance to a query.

/v1/score reads the probabilities of given tokens as the next token of a causal model. A reranker is
a cross-encoder, which scores query and document together, or generative: it is prompted through its
chat template, and the score is the probability of yes against no.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.endpoints import operation
from antiphon.gateway.http.core.fields import EMBEDDING, UnsupportedField, model_of
from antiphon.gateway.http.core.limits import Ids
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.core.pooling import (
    INPUTS_MAX,
    PoolingEndpoints,
    check_not_blank,
    sigmoid,
    softmax,
)
from antiphon.gateway.http.core.writer import total_usage
from antiphon.gateway.http.openai.embeddings import PoolingBody
from antiphon.gateway.http.openai.schema import PROMPTS_MAX, UsageBody, usage_body
from antiphon.gateway.requests.generation_request import GenerationRequest, SamplingOptions
from antiphon.gateway.requests.pooling import pooled_outputs, pooled_vector
from antiphon.gateway.requests.tokenizer_client import CARD_TIMEOUT_S
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.sampling import NAMED_MAX, PoolParams, TokenId, TokenOutputParams
from antiphon.wire.tokenize import ChatMessage, PoolingCard, TemplateParams

if TYPE_CHECKING:
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

    UNSUPPORTED: ClassVar = {
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


class RerankBody(PoolingBody, frozen=True, kw_only=True):
    """Sort documents by their relevance to a query."""

    query: str
    """The query."""
    documents: Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)]
    """Documents to sort."""
    instruct: str | None = None
    """Task instruction, passed to the chat template of a generative reranker."""
    top_n: Annotated[int, Meta(ge=1)] | None = None
    """Number of most relevant documents to return. Defaults to all."""
    return_documents: bool | None = None
    """Whether to return the text of each document. Defaults to true."""


class RankMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Token usage of a score."""

    id: str
    prompt_tokens: int


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Relevance of a document. `index` is its position in the request."""

    score: float
    document: str | None
    index: int
    meta_info: RankMeta


class ScoreEndpoints(PoolingEndpoints):
    @operation(
        "POST",
        "/v1/score",
        "Score items by the probability of label tokens as the next token.",
        body=ScoreBody,
        reply=ScoreReply,
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
        body = await self.response_handler.parse_body(request, ScoreBody, _check_items)
        answers = await self.response_handler.collect(request, _score_requests(body))
        usages = [answer.usage for answer in answers]
        return json_reply(
            ScoreReply(
                scores=[_label_scores(answer, body) for answer in answers],
                model=self.model,
                usage=usage_body(total_usage(usages)),
            )
        )

    @operation(
        "POST PUT",
        "/v1/rerank",
        "Sort documents by relevance. Requires a reranker.",
        body=RerankBody,
        reply=list[RerankResult],
        examples=({"query": "Who?", "documents": ["He.", "She."], "top_n": 1},),
    )
    async def _rerank(self, request: web.Request) -> web.Response:
        judge = await self._relevance_scorer()
        body, gen_requests = await self.response_handler.parse_body(
            request, RerankBody, lambda body: (body, _rerank_requests(body, judge))
        )

        def read(answer: CollectedResponse) -> tuple[float, RankMeta]:
            meta = RankMeta(id=answer.name, prompt_tokens=answer.usage.prompt_tokens)
            return judge.score(answer), meta

        scored = await self.response_handler.collect_each(request, gen_requests, read)
        ranked = [
            RerankResult(
                score=score,
                document=None if body.return_documents is False else document,
                index=index,
                meta_info=meta,
            )
            for index, (document, (score, meta)) in enumerate(
                zip(body.documents, scored, strict=True)
            )
        ]
        ranked.sort(key=lambda one: -one.score)
        return json_reply(ranked[: body.top_n])

    async def _relevance_scorer(self) -> RelevanceScorer:
        model = await self.tokenizers.card(CARD_TIMEOUT_S)
        if model.reranks and model.pooling is None:
            ids = [await self.tokenizers.token_id_of(word) for word in ("yes", "no")]
            if None in ids:
                text = "this model does not rerank: its tokenizer has no single token for yes or no"
                raise Unsupported(text, param="model")
            return YesNoScorer(tuple(each for each in ids if each is not None))
        card = await self.card("rerank", scores=True)
        if card.width != 1:
            text = (
                f"this model does not rerank: it is a classification model with {card.width} "
                "labels; reranking requires one label"
            )
            raise Unsupported(text, param="model")
        return CrossEncoder(card)


def _check_items(body: ScoreBody) -> ScoreBody:
    ids = isinstance(body.query, list)
    items = [body.items] if isinstance(body.items, str) else body.items
    if any(isinstance(item, list) != ids for item in items):
        raise InvalidRequest(
            "query and items must both be texts, or both be token ids", param="items"
        )
    if len(set(body.label_token_ids)) < len(body.label_token_ids):
        raise InvalidRequest.at("label_token_ids", "a token id appears twice")
    return body


def _score_requests(body: ScoreBody) -> list[GenerationRequest]:
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
                fields={"prompt": "items", "details.named_ids": "label_token_ids"},
                tokens_max=0,
                auto_truncate=False,
                sampling=SamplingOptions(details=details),
            )
        )
    return gen_requests


def _label_scores(answer: CollectedResponse, body: ScoreBody) -> list[float]:
    piece = answer.choices[0].details
    assert piece is not None, "token outputs were requested"
    *_, last = piece.details.iter_tokens()
    if not body.apply_softmax:
        return [math.exp(logprob) for logprob in last.named]
    scaled = [logprob / (body.temperature or 1.0) for logprob in last.named]
    if max(scaled) == -math.inf:
        return [1.0 / len(scaled)] * len(scaled)
    return softmax(scaled)


@dataclass(frozen=True)
class CrossEncoder:
    card: PoolingCard

    def requests(self, body: RerankBody) -> list[GenerationRequest]:
        if body.instruct:
            text = "a cross-encoder accepts only a query and a document"
            raise Unsupported.at("instruct", text)
        queries = [body.query] * len(body.documents)
        gen_requests = body.requests(queries, api="rerank", field="documents", pool=PoolParams())
        return [
            msgspec.structs.replace(gen_request, text_pair=document)
            for gen_request, document in zip(gen_requests, body.documents, strict=True)
        ]

    def score(self, answer: CollectedResponse) -> float:
        """Apply a sigmoid, unless the model's configuration sets no activation."""
        (score,) = pooled_vector(answer).numbers
        return score if self.card.plain_score else sigmoid(score)


@dataclass(frozen=True)
class YesNoScorer:
    """Scores with a generative reranker; `label_ids` are its tokens for yes and no."""

    label_ids: tuple[int, ...]

    def requests(self, body: RerankBody) -> list[GenerationRequest]:
        """Build conversations of query and document, in SGLang's format for the chat template."""
        options = {"instruct": body.instruct} if body.instruct else {}
        template = TemplateParams(options=msgspec.json.encode(options).decode())
        gen_requests = body.requests(body.documents, api="rerank", field="documents", pool=None)
        query = ChatMessage(role="user", content=body.query)
        return [
            msgspec.structs.replace(
                gen_request,
                prompt=None,
                messages=(query, ChatMessage(role="user", content=document)),
                template=template,
                auto_truncate=False,
                sampling=SamplingOptions(details=TokenOutputParams(named_ids=self.label_ids)),
            )
            for gen_request, document in zip(gen_requests, body.documents, strict=True)
        ]

    def score(self, answer: CollectedResponse) -> float:
        """Return the probability of yes, normalized over yes and no."""
        (outputs,) = pooled_outputs(answer).iter_tokens()
        yes, no = outputs.named
        if -math.inf in (yes, no):
            return 0.0 if yes == -math.inf else 1.0
        return sigmoid(yes - no)


RelevanceScorer = CrossEncoder | YesNoScorer


def _rerank_requests(body: RerankBody, judge: RelevanceScorer) -> list[GenerationRequest]:
    if not body.query.strip():
        raise InvalidRequest.at("query", "must not be empty or white space")
    check_not_blank(body.documents, "documents")
    return judge.requests(body)
