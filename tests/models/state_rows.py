"""The rows of families whose layers have a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
from tests.models.specs import fed, layered, mixed_kind

from antiphon.layers.attention import AttentionSpec
from antiphon.layers.gated_delta import GatedDeltaSpec
from antiphon.layers.mamba2 import Mamba2Spec
from antiphon.layers.norm import NormSpec
from antiphon.layers.parallel_mixers import MixerBranch, ParallelMixersSpec
from antiphon.model_worker.model.spec import EmbeddingSpec, HeadSpec, ModelSpec

Mutant = Callable[[ModelSpec], ModelSpec]
LIMIT = 5e-5
"""Chunks sum in another order than those of transformers; measured, 1.4e-5."""

FALCON = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}
SCALES = {
    "ssm_multipliers": [1.3, 0.8, 1.2, 1.4, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 1.5,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.4,
    "key_multiplier": 1.7,
    "mlp_multipliers": [1.5, 0.6],
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
}
BIASES = {
    "attention_bias": True,
    "mlp_bias": True,
    "mamba_conv_bias": True,
    "mamba_proj_bias": True,
    "projectors_bias": True,
}


def no_biases(spec: ModelSpec) -> ModelSpec:
    """No linear and no convolution with a bias."""
    spec = mixed_kind(spec, AttentionSpec, qkv_bias=False, out_bias=False)
    spec = mixed_kind(spec, Mamba2Spec, conv_bias=False, input_bias=False, out_bias=False)
    return fed(spec, bias=False)


def no_gated_norm(spec: ModelSpec) -> ModelSpec:
    """The gate alone behind the recurrence."""
    return mixed_kind(spec, Mamba2Spec, norm_eps=None)


def gate_last(spec: ModelSpec) -> ModelSpec:
    """The gate behind the norm."""
    return mixed_kind(spec, Mamba2Spec, gate_first=False)


def gate_first(spec: ModelSpec) -> ModelSpec:
    """The gate before the norm."""
    return mixed_kind(spec, Mamba2Spec, gate_first=True)


def no_step_limits(spec: ModelSpec) -> ModelSpec:
    """Steps as long as they come."""
    return mixed_kind(spec, Mamba2Spec, step_limits=(0.0, float("inf")))


def no_input_scales(spec: ModelSpec) -> ModelSpec:
    """What the projection gives as it is."""
    return mixed_kind(spec, Mamba2Spec, scales=(1.0,) * 5)


def no_branch_scales(spec: ModelSpec) -> ModelSpec:
    """Branches side by side as they are."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, ParallelMixersSpec)
    return layered(
        spec,
        mixer=ParallelMixersSpec(
            tuple(MixerBranch(mixer=branch.mixer) for branch in mixer.branches)
        ),
    )


def one_branch(spec: ModelSpec) -> ModelSpec:
    """Attention alone."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, ParallelMixersSpec)
    return layered(spec, mixer=ParallelMixersSpec(mixer.branches[1:]))


def no_key_scale(spec: ModelSpec) -> ModelSpec:
    """Scores scaled by the size of a head alone."""
    return mixed_kind(spec, AttentionSpec, scale=0.25)


def no_feed_forward_scales(spec: ModelSpec) -> ModelSpec:
    """The feed-forward block as it is."""
    return fed(spec, scale_gate=1.0, scale_out=1.0)


def no_embedding_scale(spec: ModelSpec) -> ModelSpec:
    """Embeddings as they are."""
    return msgspec.structs.replace(spec, embedding=EmbeddingSpec())


def no_logit_scale(spec: ModelSpec) -> ModelSpec:
    """Logits as they are."""
    assert isinstance(spec.head, HeadSpec)
    return msgspec.structs.replace(spec, head=msgspec.structs.replace(spec.head, scale=1.0))


FALCON_MUTANTS: dict[str, Mutant] = {
    "biases": no_biases,
    "state": one_branch,
    "gated norm": no_gated_norm,
    "step limits": no_step_limits,
    "scaled inputs": no_input_scales,
    "scaled branches": no_branch_scales,
    "attention scale": no_key_scale,
    "scaled feed-forward": no_feed_forward_scales,
    "scaled embedding": no_embedding_scale,
    "scaled logits": no_logit_scale,
}

QWEN = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_only_layers": [0, 1, 2],
    "head_dim": 32,
    "attention_bias": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    },
}


def no_attention_gate(spec: ModelSpec) -> ModelSpec:
    """What heads give as it is. Queries still lie beside their gates."""
    return mixed_kind(spec, AttentionSpec, gated=False)


def whole_rotation(spec: ModelSpec) -> ModelSpec:
    """All of each head rotated."""
    rotary = next(m.rotary for s in spec.layers for m in s.mixers if isinstance(m, AttentionSpec))
    assert rotary is not None
    return mixed_kind(spec, AttentionSpec, rotary=replace(rotary, size=32))


def no_qk_norm(spec: ModelSpec) -> ModelSpec:
    """Queries and keys as they are projected."""
    return mixed_kind(spec, AttentionSpec, qk_norm=None)


def plain_norms(spec: ModelSpec) -> ModelSpec:
    """Norms by their weight alone."""
    norm = NormSpec(kind="rms_wide", eps=spec.norm.eps)
    return msgspec.structs.replace(layered(spec, norm=norm), norm=norm)


def other_epsilon(spec: ModelSpec) -> ModelSpec:
    """Another epsilon behind the recurrence."""
    return mixed_kind(spec, GatedDeltaSpec, norm_eps=1.0)


QWEN_MUTANTS: dict[str, Mutant] = {
    "biases": no_biases,
    "gated norm": other_epsilon,
    "gated attention": no_attention_gate,
    "partial RoPE": whole_rotation,
    "qk-norm": no_qk_norm,
    "norms of 1 + weight": plain_norms,
}
