"""Texts in, vectors or scores out: what the doors that embed, classify and rerank share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from antiphon.gateway.ask import Ask
from antiphon.gateway.encode import PATIENCE_S
from antiphon.gateway.http.openai.reading import model_of
from antiphon.gateway.pooling import OPEN_MAX, read_vector
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import ClientKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering
    from antiphon.gateway.pooling import Pooled, Prompt
    from antiphon.wire.sampling import PoolParams
    from antiphon.wire.tokenize import PoolingCard

INPUTS_MAX = 2048
"""Most texts of a body, as OpenAI has it."""


class Vectors:
    """Knows what the model makes of texts, and has it made."""

    def __init__(self, answering: Answering, tokenizers: TokenizerCalls) -> None:
        self._answering = answering
        self._tokenizers = tokenizers

    async def card(self, does: str) -> PoolingCard:
        """What the model makes of a text.

        Args:
            does: What it is wanted for, a verb.

        Raises:
            Unsupported: It generates.
            EngineError: No tokenizer answers.
        """
        card = (await self._tokenizers.card(PATIENCE_S)).pooling
        if card is None:
            raise Unsupported(f"this model does not {does}: it generates text", param="model")
        return card

    async def embedder(self) -> PoolingCard:
        """The card of a model that embeds.

        Raises:
            Unsupported: It does not.
        """
        card = await self.card("embed")
        if card.scores:
            raise Unsupported("this model does not embed: it scores labels", param="model")
        return card

    async def scorer(self, does: str) -> PoolingCard:
        """The card of a model that scores labels.

        Raises:
            Unsupported: It does not.
        """
        card = await self.card(does)
        if not card.scores:
            raise Unsupported(f"this model does not {does}: it embeds", param="model")
        return card

    async def of(self, request: web.Request, asks: Sequence[Ask]) -> list[Pooled]:
        """What each text became, in their order. The client's leaving ends those under way.

        Raises:
            EngineError: Of the first that failed.
        """
        return await self._answering.hear_each(request, asks, read_vector, OPEN_MAX)


def asks_for(
    prompts: Sequence[Prompt],
    *,
    door: str,
    field: str,
    model: str | None,
    pool: PoolParams | None,
    rid: str | None = None,
    priority: int | None = None,
    salt: bytes = b"",
) -> list[Ask]:
    """One ask a prompt, which came in `field`; the names of several begin with `rid`."""
    names = [rid] if len(prompts) == 1 else [rid and f"{rid}_{n}" for n in range(len(prompts))]
    return [
        Ask(
            door=door,
            prompt_field=field,
            model=model_of(model),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=None if isinstance(prompt, str) else prompt,
            tokens_max=0,
            pool=pool,
            key=None if name is None else ClientKey(name),
            priority=priority,
            cache_salt=salt,
        )
        for prompt, name in zip(prompts, names, strict=True)
    ]


def refuse_blank(prompts: Sequence[Prompt], field: str) -> None:
    """Refuse texts in which there is nothing.

    Raises:
        InvalidRequest: Names the first.
    """
    for index, prompt in enumerate(prompts):
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise InvalidRequest(f"{field}: text {index} is empty or white space", param=field)


def sigmoid(score: float) -> float:
    """1 / (1 + exp(-score)), without overflow."""
    if score >= 0:
        return 1.0 / (1.0 + math.exp(-score))
    power = math.exp(score)
    return power / (1.0 + power)
