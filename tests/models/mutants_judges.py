"""Specs of models that draw no tokens, without one feature."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from tests.models.mutants import embedded
from tests.models.specs import fed, layered, mixed

from antiphon.layers.classification_head import ClassificationHeadSpec

if TYPE_CHECKING:
    from antiphon.model_worker.model.spec import ModelSpec


def biases(spec: ModelSpec) -> ModelSpec:
    """No linear of attention with a bias."""
    return mixed(spec, qkv_bias=False, out_bias=False)


def last_token(spec: ModelSpec) -> ModelSpec:
    """What the first token knows."""
    return msgspec.structs.replace(spec, pooling="cls")


def first_token(spec: ModelSpec) -> ModelSpec:
    """What the last token knows."""
    return msgspec.structs.replace(spec, pooling="last")


def pooling(spec: ModelSpec) -> ModelSpec:
    """The other of the two ways."""
    return msgspec.structs.replace(spec, pooling="mean" if spec.pooling == "cls" else "cls")


def dense_layer(spec: ModelSpec) -> ModelSpec:
    """Scores of the stream itself."""
    return _scored(spec, dense=None)


def norm_of_dense(spec: ModelSpec) -> ModelSpec:
    """What the activation gives as it is."""
    assert isinstance(spec.head, ClassificationHeadSpec)
    assert spec.head.dense is not None
    return _scored(spec, dense=replace(spec.head.dense, norm=None))


def both_ways(spec: ModelSpec) -> ModelSpec:
    """No look at what is to come."""
    return mixed(spec, causal=True)


def norms_of_stream(spec: ModelSpec) -> ModelSpec:
    """Norms of what parts give, in the place of norms of the stream."""
    norms = spec.layers[0].norms
    after = msgspec.structs.replace(
        norms,
        with_mixer=None,
        with_feed_forward=None,
        after_mixer=norms.with_mixer,
        after_feed_forward=norms.with_feed_forward,
    )
    return layered(spec, norms=after)


def norm_of_embedding(spec: ModelSpec) -> ModelSpec:
    """The sum of a token's vectors as it is."""
    return embedded(spec, norm=None)


def types_of_tokens(spec: ModelSpec) -> ModelSpec:
    """No token of any type."""
    return embedded(spec, types=None)


def positions_after_padding(spec: ModelSpec) -> ModelSpec:
    """Positions from the first row of their table on."""
    first = spec.embedding.positions_first
    moved = msgspec.structs.replace(spec, context_tokens=spec.context_tokens + first)
    return embedded(moved, positions_first=0)


def gelu(spec: ModelSpec) -> ModelSpec:
    """The gate that approximates it."""
    return fed(spec, activation="gelu_tanh")


def _scored(spec: ModelSpec, **changes: object) -> ModelSpec:
    assert isinstance(spec.head, ClassificationHeadSpec)
    return msgspec.structs.replace(spec, head=replace(spec.head, **changes))
