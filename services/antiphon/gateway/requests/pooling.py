"""Requests for vectors or scores, shared by all APIs that return them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.requests.generation_request import MediumSource
from antiphon.wire.base import FinishReason, Usage
from antiphon.wire.errors import Cancelled, InvalidRequest, Unsupported
from antiphon.wire.sampling import PoolParams
from antiphon.wire.token_outputs import TokenOutputs, unpack_floats

if TYPE_CHECKING:
    from antiphon.gateway.stream.stream import CollectedResponse
    from antiphon.wire.tokenize import PoolingCard

OPEN_MAX = 64
"""Maximum number of pooling requests of one body in flight; the rest wait in the gateway."""

Prompt = str | tuple[int, ...]
PooledInput = Prompt | MediumSource
"""What a vector is made of: a text, its token ids, or an image."""


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a pooling request: little-endian float32. `weights` is the weight version."""

    id: str
    vector: bytes
    usage: Usage
    weights: str | None

    @property
    def numbers(self) -> list[float]:
        return list(unpack_floats(self.vector))


def wrong_model(does: str, card: PoolingCard | None) -> Unsupported:
    kind = "a text generation model"
    if card is not None:
        kind = "a classification model" if card.scores else "an embedding model"
    return Unsupported(f"this model does not {does}: it is {kind}", param="model")


def pool_params(card: PoolingCard, dimensions: int | None) -> PoolParams:
    if dimensions is None or dimensions == card.width:
        return PoolParams()
    text = None
    if dimensions > card.width:
        text = f"must be at most {card.width}, the width of this model's vectors"
    elif not card.matryoshka:
        text = "this model's vectors cannot be truncated, according to its config.json"
    elif card.cuts and dimensions not in card.cuts:
        text = f"this model supports {', '.join(map(str, card.cuts))}"
    if text is not None:
        raise InvalidRequest.at("dimensions", text)
    return PoolParams(dimensions=dimensions)


def pooled_vector(answer: CollectedResponse) -> Pooled:
    vector = pooled_outputs(answer).pooled
    return Pooled(id=answer.name, vector=vector, usage=answer.usage, weights=answer.weight_version)


def pooled_outputs(answer: CollectedResponse) -> TokenOutputs:
    (choice,) = answer.choices
    if choice.end.reason is FinishReason.ABORT or choice.details is None:
        raise Cancelled("the request was aborted")
    return choice.details.details
