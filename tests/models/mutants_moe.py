"""Specs with a mixture of experts, or with latent attention, that lack one feature."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from tests.models.specs import mixed

from antiphon.layers.experts import ClampedSwish, StackedExperts
from antiphon.layers.mla import LatentSpec
from antiphon.layers.moe import MoeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.model.spec import ModelSpec


def biases(spec: ModelSpec) -> ModelSpec:
    """No linear of attention with a bias."""
    return mixed(spec, qkv_bias=False, out_bias=False)


def renormalised(spec: ModelSpec) -> ModelSpec:
    """Shares as they are of all experts."""
    return _routed(spec, renormalised=False)


def plain_shares(spec: ModelSpec) -> ModelSpec:
    """Shares of the chosen alone."""
    return _routed(spec, renormalised=True)


def scaling(spec: ModelSpec) -> ModelSpec:
    """Shares as they come."""
    return _routed(spec, factor=1.0)


def groups(spec: ModelSpec) -> ModelSpec:
    """All experts to choose from."""
    return _routed(spec, groups=1, groups_kept=1)


def two_best(spec: ModelSpec) -> ModelSpec:
    """Groups by their best expert."""
    return _routed(spec, group_best=1)


def sigmoid_scores(spec: ModelSpec) -> ModelSpec:
    """Experts that compete."""
    return _routed(spec, scoring="softmax")


def correction(spec: ModelSpec) -> ModelSpec:
    """Scores that choose alone."""
    return _sparse(spec, correction=None)


def router_bias(spec: ModelSpec) -> ModelSpec:
    """Logits without a bias."""
    return _sparse(spec, router_bias=False)


def shared_block(spec: ModelSpec) -> ModelSpec:
    """Experts alone."""
    return _sparse(spec, shared=None, shared_gate=None)


def shared_gate(spec: ModelSpec) -> ModelSpec:
    """All of the shared block counts."""
    return _sparse(spec, shared_gate=None)


def expert_biases(spec: ModelSpec) -> ModelSpec:
    """Experts without biases."""
    return _with_experts(spec, bias=False)


def clamped_gate(spec: ModelSpec) -> ModelSpec:
    """A gate as high as it comes."""
    return _with_experts(spec, activation=ClampedSwish(alpha=1.702, limit=1e9))


def sharpened_gate(spec: ModelSpec) -> ModelSpec:
    """A gate by its own sigmoid."""
    return _with_experts(spec, activation=ClampedSwish(alpha=1.0, limit=0.5))


def in_turn(spec: ModelSpec) -> ModelSpec:
    """All gates before all ups."""
    return _with_experts(spec, names=StackedExperts())


def weighed_input(spec: ModelSpec) -> ModelSpec:
    """Shares of what comes out of experts."""
    return _with_experts(spec, apply_router_weight_on_input=False)


def grown_scores(spec: ModelSpec) -> ModelSpec:
    """Scores scaled by the size of a head."""
    latent = spec.layers[0].mixer
    assert isinstance(latent, LatentSpec)
    sizes = latent.sizes
    return mixed(spec, scale=(sizes.content + sizes.position) ** -0.5)


def _routed(spec: ModelSpec, **changes: object) -> ModelSpec:
    return _each(spec, lambda moe: replace(moe, routing=replace(moe.routing, **changes)))


def _with_experts(spec: ModelSpec, **changes: object) -> ModelSpec:
    return _each(spec, lambda moe: replace(moe, experts=replace(moe.experts, **changes)))


def _sparse(spec: ModelSpec, **changes: object) -> ModelSpec:
    return _each(spec, lambda moe: replace(moe, **changes))


def _each(spec: ModelSpec, change: Callable[[MoeSpec], MoeSpec]) -> ModelSpec:
    """Every mixture of experts changed."""
    layers = tuple(
        msgspec.structs.replace(layer, feed_forward=change(layer.feed_forward))
        if isinstance(layer.feed_forward, MoeSpec)
        else layer
        for layer in spec.layers
    )
    return msgspec.structs.replace(spec, layers=layers)
