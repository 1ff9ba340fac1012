"""Texts in, vectors or scores out: what every door that has them made shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.errors import Cancelled, InvalidRequest
from antiphon.wire.sampling import PoolParams
from antiphon.wire.token_outputs import unpack_floats

if TYPE_CHECKING:
    from antiphon.gateway.stream.group import CollectedResponse
    from antiphon.wire.token_outputs import TokenOutputs
    from antiphon.wire.tokenize import PoolingCard

OPEN_MAX = 64
"""Most of them that are under way at once; the others wait here for nobody but them."""

Prompt = str | tuple[int, ...]


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """What a text became: float32, little-endian; `weights` names those that computed it."""

    id: str
    vector: bytes
    usage: Usage
    weights: str | None

    @property
    def numbers(self) -> list[float]:
        """The vector, or the scores."""
        return list(unpack_floats(self.vector))


def pool_params(card: PoolingCard, dimensions: int | None) -> PoolParams:
    """Check how much of a vector is wanted.

    Raises:
        InvalidRequest: There is not so much of it, or the model was not made to be cut there.
    """
    if dimensions is None or dimensions == card.width:
        return PoolParams()
    text = None
    if dimensions > card.width:
        text = f"dimensions: the vectors of this model have {card.width}"
    elif not card.matryoshka:
        text = "dimensions: this model's vectors cannot be cut, or its config.json does not say so"
    elif card.cuts and dimensions not in card.cuts:
        text = f"dimensions: this model has {', '.join(map(str, card.cuts))}"
    if text is not None:
        raise InvalidRequest(text, param="dimensions")
    return PoolParams(dimensions=dimensions)


def pooled_vector(answer: CollectedResponse) -> Pooled:
    """What the text of an answer became.

    Raises:
        Cancelled: The request was aborted.
    """
    vector = pooled_outputs(answer).pooled
    return Pooled(id=answer.name, vector=vector, usage=answer.usage, weights=answer.weight_version)


def pooled_outputs(answer: CollectedResponse) -> TokenOutputs:
    """What is told in place of an answer.

    Raises:
        Cancelled: The request was aborted.
    """
    (choice,) = answer.choices
    if choice.end.reason is FinishReason.ABORT or choice.details is None:
        raise Cancelled("the request was aborted")
    return choice.details.details
