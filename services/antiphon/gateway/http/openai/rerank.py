"""POST /v1/rerank: documents in the order in which they answer a query.

A cross-encoder scores the two together. A decoder that was trained for it is asked whether the
document answers, by its own chat template, and its score is how much likelier yes is than no.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.operation import Operation
from antiphon.gateway.http.core.pooling import (
    INPUTS_MAX,
    check_not_blank,
    pooling_requests,
    sigmoid,
)
from antiphon.gateway.http.core.reply import json_reply
from antiphon.gateway.http.openai.schema import Rid
from antiphon.gateway.http.openai.unsupported import EMBEDDING, RERANK
from antiphon.gateway.requests.generation_request import GenerationRequest, SamplingOptions
from antiphon.gateway.requests.pooling import OPEN_MAX, pooled_outputs, pooled_vector
from antiphon.gateway.requests.tokenizer_client import CARD_TIMEOUT_S
from antiphon.wire.digests import CacheSaltText, cache_salt
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.sampling import PoolParams, TokenOutputParams
from antiphon.wire.tokenize import ChatMessage, TemplateParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from antiphon.gateway.http.core.fields import UnsupportedField
    from antiphon.gateway.http.core.pooling import PoolingHandler
    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.gateway.stream.group import CollectedResponse
    from antiphon.wire.tokenize import PoolingCard


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/rerank."""

    model: Annotated[str | None, Meta(description="The served model; null takes it.")] = None
    query: Annotated[str, Meta(description="What is looked for.")]
    documents: Annotated[
        list[str],
        Meta(min_length=1, max_length=INPUTS_MAX, description="What is put in order."),
    ]
    instruct: Annotated[
        str | None,
        Meta(description="What makes a document an answer; for the template of a decoder."),
    ] = None
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Only so many, the best.")
    ] = None
    return_documents: Annotated[
        bool | None, Meta(description="Whether the texts are told again; true unless said.")
    ] = None
    rid: Annotated[Rid | None, Meta(description="The client's name for it.")] = None
    cache_salt: Annotated[
        CacheSaltText | None,
        Meta(description="Cached prefixes are shared with those who say the same."),
    ] = None
    extra_key: Annotated[
        CacheSaltText | None, Meta(description="Likewise; both must be the same.")
    ] = None


class RankMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a score has cost."""

    id: str
    prompt_tokens: int


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """How well a document answers; `index` is its place in the request."""

    score: float
    document: str | None
    index: int
    meta_info: RankMeta


class RelevanceScorer(Protocol):
    """How a model is asked for the score of a document, and what it says."""

    @property
    def refused(self) -> Mapping[str, UnsupportedField]:
        """Fields that it has no use for."""
        ...

    def requests(self, body: RerankBody) -> list[GenerationRequest]:
        """One for each document."""
        ...

    def score(self, answer: CollectedResponse) -> float:
        """From 0 to 1, unless the model's own scores are told as they are."""
        ...


class RerankEndpoints:
    """Finds out how the model judges, and has it judge."""

    def __init__(
        self,
        response_handler: ResponseHandler,
        vectors: PoolingHandler,
        tokenizers: TokenizerClient,
    ) -> None:
        self._response_handler = response_handler
        self._vectors = vectors
        self._tokenizers = tokenizers

    def operations(self) -> list[Operation]:
        """One, by two methods."""
        return [
            Operation(
                method=method,
                path="/v1/rerank",
                handler=self._rerank,
                summary="Documents, the best first, as the model scores them: a list.",
                body=RerankBody,
                reply=list[Ranked],
                unsupported=EMBEDDING,
                examples=({"query": "Who?", "documents": ["He.", "She."], "top_n": 1},),
                deprecated=method == "PUT",
            )
            for method in ("POST", "PUT")
        ]

    async def _rerank(self, request: web.Request) -> web.Response:
        judge = await self._scorer()
        body, gen_requests = await self._response_handler.parse_body(
            request, RerankBody, lambda body: (body, _checked(body, judge)), judge.refused
        )

        def read(answer: CollectedResponse) -> tuple[float, RankMeta]:
            meta = RankMeta(id=answer.name, prompt_tokens=answer.usage.prompt_tokens)
            return judge.score(answer), meta

        scored = await self._response_handler.collect_each(request, gen_requests, read, OPEN_MAX)
        ranked = [
            Ranked(
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

    async def _scorer(self) -> RelevanceScorer:
        """How this model judges.

        Raises:
            Unsupported: It does not.
        """
        model = await self._tokenizers.card(CARD_TIMEOUT_S)
        if model.reranks and model.pooling is None:
            ids = [await self._tokenizers.token_id_of(word) for word in ("yes", "no")]
            if None in ids:
                text = "this model does not rerank: its tokenizer has no token for yes, or for no"
                raise Unsupported(text, param="model")
            return YesNoScorer(tuple(each for each in ids if each is not None))
        card = await self._vectors.scorer("rerank")
        if card.width != 1:
            text = f"this model does not rerank: it scores {card.width} labels, not one"
            raise Unsupported(text, param="model")
        return CrossEncoder(card)


class CrossEncoder:
    """Scores two texts that it reads together."""

    refused = RERANK

    def __init__(self, card: PoolingCard) -> None:
        self._card = card

    def requests(self, body: RerankBody) -> list[GenerationRequest]:
        """Pairs."""
        queries = [body.query] * len(body.documents)
        gen_requests = pooling_requests(
            queries,
            api="rerank",
            field="documents",
            model=body.model,
            pool=PoolParams(),
            rid=body.rid,
            salt=cache_salt(body.cache_salt, body.extra_key),
        )
        return [
            msgspec.structs.replace(gen_request, pair=document)
            for gen_request, document in zip(gen_requests, body.documents, strict=True)
        ]

    def score(self, answer: CollectedResponse) -> float:
        """Through a sigmoid, unless the model says otherwise."""
        (score,) = pooled_vector(answer).numbers
        return score if self._card.plain_score else sigmoid(score)


class YesNoScorer:
    """Asks a decoder; `label_ids` are its tokens for yes and no."""

    refused = EMBEDDING

    def __init__(self, label_ids: tuple[int, ...]) -> None:
        self._details = TokenOutputParams(named_ids=label_ids)

    def requests(self, body: RerankBody) -> list[GenerationRequest]:
        """Conversations of query and document, as SGLang gives them to the chat template."""
        options = {"instruct": body.instruct} if body.instruct else {}
        template = TemplateParams(options=msgspec.json.encode(options).decode())
        gen_requests = pooling_requests(
            body.documents,
            api="rerank",
            field="documents",
            model=body.model,
            pool=None,
            rid=body.rid,
            salt=cache_salt(body.cache_salt, body.extra_key),
        )
        query = ChatMessage(role="user", content=body.query)
        return [
            msgspec.structs.replace(
                gen_request,
                prompt=None,
                messages=(query, ChatMessage(role="user", content=document)),
                template=template,
                auto_truncate=False,
                sampling=SamplingOptions(details=self._details),
            )
            for gen_request, document in zip(gen_requests, body.documents, strict=True)
        ]

    def score(self, answer: CollectedResponse) -> float:
        """How much of the chance of both has yes."""
        (told,) = pooled_outputs(answer).iter_tokens()
        yes, no = told.named
        if -math.inf in (yes, no):
            return 0.0 if yes == -math.inf else 1.0
        return sigmoid(yes - no)


def _checked(body: RerankBody, judge: RelevanceScorer) -> list[GenerationRequest]:
    if not body.query.strip():
        raise InvalidRequest("query: it is empty or white space", param="query")
    check_not_blank(body.documents, "documents")
    return judge.requests(body)
