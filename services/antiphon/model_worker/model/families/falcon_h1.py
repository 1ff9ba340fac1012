"""Falcon-H1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.parallel_mixers import MixerBranch, ParallelMixersSpec
from antiphon.layers.recurrent import Mamba2Spec, Scales
from antiphon.model_worker.model.llama_parts import attention, gated, model, rms_norm
from antiphon.model_worker.model.spec import (
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelFamily,
    ModelSpec,
    Norms,
)

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile


class _SpecialFloat(msgspec.Struct, frozen=True):
    """A float that JSON lacks, as transformers encodes it."""

    value: str = msgspec.field(name="__float__")

    def __float__(self) -> float:
        return float(self.value)


class _FalconH1Fields(msgspec.Struct, frozen=True, kw_only=True):
    mamba_n_heads: int
    mamba_d_head: int
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    time_step_limit: tuple[float | _SpecialFloat, float | _SpecialFloat] = (
        0.0,
        _SpecialFloat("Infinity"),
    )
    ssm_multipliers: Scales = (1.0, 1.0, 1.0, 1.0, 1.0)
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    key_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0


def declare(config: ConfigFile) -> ModelSpec:
    """Falcon-H1: attention and Mamba 2 in parallel in every layer, and multipliers throughout."""
    fields = config.family_fields(_FalconH1Fields)
    scale_gate, scale_out = fields.mlp_multipliers
    layer = LayerSpec(
        mixer=ParallelMixersSpec((_mamba(config, fields), _attention(config, fields))),
        feed_forward=gated(
            config,
            bias=config.mlp_bias,
            gate="feed_forward.gate_proj",
            up="feed_forward.up_proj",
            down="feed_forward.down_proj",
            scale_gate=scale_gate,
            scale_out=scale_out,
        ),
        norm=rms_norm(config),
        norms=Norms(before_mixer="input_layernorm", before_feed_forward="pre_ff_layernorm"),
    )
    return model(
        config,
        layer,
        norm_name="model.final_layernorm",
        embedding=EmbeddingSpec(scale=fields.embedding_multiplier),
        head=HeadSpec(tied=config.tie_word_embeddings, scale=fields.lm_head_multiplier),
    )


def _attention(config: ConfigFile, fields: _FalconH1Fields) -> MixerBranch:
    # A multiplier of keys is one of scores, since keys are used for nothing else.
    scale = config.head_size**-0.5 * fields.key_multiplier
    return MixerBranch(
        mixer=attention(config, bias=config.attention_bias, scale=scale),
        scale_in=fields.attention_in_multiplier,
        scale_out=fields.attention_out_multiplier,
    )


def _mamba(config: ConfigFile, fields: _FalconH1Fields) -> MixerBranch:
    shortest, longest = fields.time_step_limit
    return MixerBranch(
        mixer=Mamba2Spec(
            heads=fields.mamba_n_heads,
            head_size=fields.mamba_d_head,
            groups=fields.mamba_n_groups,
            state_size=fields.mamba_d_state,
            taps=fields.mamba_d_conv,
            conv_bias=fields.mamba_conv_bias,
            input_bias=fields.mamba_proj_bias,
            out_bias=fields.projectors_bias,
            norm_eps=config.rms_norm_eps if fields.mamba_rms_norm else None,
            gate_first=not fields.mamba_norm_before_gate,
            step_limits=(float(shortest), float(longest)),
            scales=fields.ssm_multipliers,
        ),
        scale_in=fields.ssm_in_multiplier,
        scale_out=fields.ssm_out_multiplier,
    )


FALCON_H1 = ModelFamily("falcon-h1", declare)
