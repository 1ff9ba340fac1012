"""Shared by the APIs that embed, classify and rerank: from texts to vectors or scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from antiphon.gateway.http.core.endpoints import Endpoints
from antiphon.gateway.http.core.fields import model_of
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    MediumSource,
    media_fields,
)
from antiphon.gateway.requests.pooling import (
    Pooled,
    PooledInput,
    pooled_vector,
    wrong_model,
)
from antiphon.gateway.requests.tokenizer_client import CARD_TIMEOUT_S
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import ClientKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.wire.sampling import PoolParams
    from antiphon.wire.tokenize import PoolingCard

INPUTS_MAX = 2048
"""Maximum number of inputs in a body, as in OpenAI's API."""


class PoolingEndpoints(Endpoints):
    """Endpoints that run pooling requests, and check that the model supports them."""

    async def card(self, does: str, *, scores: bool | None = None) -> PoolingCard:
        """Return the model's card, if it is a pooling model that does, or does not, score."""
        card = (await self.tokenizers.card(CARD_TIMEOUT_S)).pooling
        if card is None or scores not in (None, card.scores):
            raise wrong_model(does, card)
        return card

    async def pooled(
        self, request: web.Request, gen_requests: Sequence[GenerationRequest]
    ) -> list[Pooled]:
        """Run all requests and return their results in order. A client disconnect aborts them."""
        return await self.response_handler.collect_each(request, gen_requests, pooled_vector)


def pooling_requests(
    prompts: Sequence[PooledInput],
    *,
    api: str,
    field: str,
    model: str | None,
    pool: PoolParams | None,
    rid: str | None = None,
    priority: int | None = None,
    salt: bytes = b"",
) -> list[GenerationRequest]:
    """Create one request per prompt. `field` holds the prompts; `rid` is a prefix of their ids."""
    names = [rid] if len(prompts) == 1 else [rid and f"{rid}_{n}" for n in range(len(prompts))]
    requests: list[GenerationRequest] = []
    for prompt, name in zip(prompts, names, strict=True):
        media = (prompt,) if isinstance(prompt, MediumSource) else ()
        text = prompt if isinstance(prompt, str) else "" if media else None
        requests.append(
            GenerationRequest(
                api=api,
                fields={"prompt": field, "messages": field, **media_fields(media)},
                model=model_of(model),
                prompt=text,
                prompt_ids=prompt if isinstance(prompt, tuple) else None,
                media=media,
                tokens_max=0,
                pooling=pool,
                key=None if name is None else ClientKey(name),
                priority=priority,
                cache_salt=salt,
            )
        )
    return requests


def check_not_blank(prompts: Sequence[PooledInput], field: str) -> None:
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, MediumSource):
            continue
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise InvalidRequest.at(field, f"text {index} is empty or white space")


def sigmoid(score: float) -> float:
    """1 / (1 + exp(-score)), without overflow."""
    if score >= 0:
        return 1.0 / (1.0 + math.exp(-score))
    power = math.exp(score)
    return power / (1.0 + power)


def softmax(scores: Sequence[float]) -> list[float]:
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    return [weight / sum(weights) for weight in weights]
