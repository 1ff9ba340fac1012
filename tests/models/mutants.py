"""Specs without one feature: what the parity test must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
from tests.models.specs import attention_of, fed, layered, mixed, windowed

from antiphon.kernels.rotary import LongScaling, RotarySpec
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.mla import LatentSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.spec import EmbeddingSpec, HeadSpec, ModelSpec

Mutant = Callable[[ModelSpec], ModelSpec]


def biases(spec: ModelSpec) -> ModelSpec:
    """No linear of a layer with a bias."""
    return fed(mixed(spec, qkv_bias=False, out_bias=False), bias=False)


def windows(spec: ModelSpec) -> ModelSpec:
    """Every layer sees every token."""
    return windowed(spec, (None,) * len(spec.layers))


def runs_of_tokens(spec: ModelSpec) -> ModelSpec:
    """A window in the place of each run."""
    return mixed(spec, chunked=False)


def temperature(spec: ModelSpec) -> ModelSpec:
    """Scores of all queries as they come."""
    return mixed(spec, temperature=None)


def qk_norm(spec: ModelSpec) -> ModelSpec:
    """Queries and keys as they are projected."""
    return mixed(spec, qk_norm=None)


def rope_scaling(spec: ModelSpec) -> ModelSpec:
    """The rotation before it was stretched."""
    return mixed(spec, rotary=replace(_rotary(spec), scaling=None))


def partial_rotation(spec: ModelSpec) -> ModelSpec:
    """All of each head rotated."""
    rotary, size = _rotary(spec), attention_of(spec.layers[0]).head_size
    scaling = rotary.scaling
    if isinstance(scaling, LongScaling):
        scaling = replace(scaling, factors=(scaling.factors * 2)[: size // 2])
    return mixed(spec, rotary=replace(rotary, size=size, scaling=scaling))


def neighbouring_pairs(spec: ModelSpec) -> ModelSpec:
    """Pairs of a head and a half."""
    return mixed(spec, interleaved_rope=False)


def unrotated_layers(spec: ModelSpec) -> ModelSpec:
    """Every layer rotated."""
    return mixed(spec, rotary=_rotary(spec))


def local_rotation(spec: ModelSpec) -> ModelSpec:
    """Local layers rotated as global ones are."""
    rotary = next(mixer.rotary for mixer in map(attention_of, spec.layers) if mixer.window is None)
    return mixed(spec, rotary=rotary)


def scale_of_scores(spec: ModelSpec) -> ModelSpec:
    """Scores scaled by the size of a head."""
    return mixed(spec, scale=attention_of(spec.layers[0]).head_size ** -0.5)


def capped_scores(spec: ModelSpec) -> ModelSpec:
    """Scores as high as they come."""
    return mixed(spec, softcap=None)


def sinks(spec: ModelSpec) -> ModelSpec:
    """Nothing but tokens in the softmax."""
    return mixed(spec, sinks=False)


def capped_logits(spec: ModelSpec) -> ModelSpec:
    """Logits as high as they come."""
    return _headed(spec, softcap=None)


def scaled_logits(spec: ModelSpec) -> ModelSpec:
    """Logits as they come."""
    return _headed(spec, scale=1.0)


def biased_head(spec: ModelSpec) -> ModelSpec:
    """A head without bias."""
    return _headed(spec, bias=False)


def scaled_embedding(spec: ModelSpec) -> ModelSpec:
    """Embeddings as they come."""
    return embedded(spec, scale=1.0)


def learned_positions(spec: ModelSpec) -> ModelSpec:
    """No word on where a token is."""
    return embedded(spec, positions=None)


def scaled_parts(spec: ModelSpec) -> ModelSpec:
    """What parts give, added as it is."""
    return layered(spec, multiplier=1.0)


def parallel_parts(spec: ModelSpec) -> ModelSpec:
    """One part after the other."""
    return layered(spec, parallel=False)


def tanh(spec: ModelSpec) -> ModelSpec:
    """The gate that tanh approximates."""
    return fed(spec, activation="gelu")


def norms_after(spec: ModelSpec) -> ModelSpec:
    """No norm of what parts give."""
    norms = msgspec.structs.replace(spec.layers[0].norms, after_mixer=None, after_feed_forward=None)
    return layered(spec, norms=norms)


def one_plus(spec: ModelSpec) -> ModelSpec:
    """Norms by their weight alone."""
    return _normed(spec, NormSpec(kind="rms_wide", eps=spec.norm.eps))


def layer_norms(spec: ModelSpec) -> ModelSpec:
    """Norms without mean and bias."""
    return _normed(spec, NormSpec(kind="rms_wide", eps=spec.norm.eps))


def _normed(spec: ModelSpec, norm: NormSpec) -> ModelSpec:
    if attention_of(spec.layers[0]).qk_norm is not None:
        spec = mixed(spec, qk_norm=norm)
    return msgspec.structs.replace(layered(spec, norm=norm), norm=norm)


def _rotary(spec: ModelSpec) -> RotarySpec:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec | LatentSpec)
    rotary = mixer.rotary
    assert rotary is not None
    return rotary


def _headed(spec: ModelSpec, **changes: object) -> ModelSpec:
    assert isinstance(spec.head, HeadSpec)
    head: HeadSpec = msgspec.structs.replace(spec.head, **changes)
    return msgspec.structs.replace(spec, head=head)


def embedded(spec: ModelSpec, **changes: object) -> ModelSpec:
    """The embedding changed."""
    embedding: EmbeddingSpec = msgspec.structs.replace(spec.embedding, **changes)
    return msgspec.structs.replace(spec, embedding=embedding)
