"""Every family of models and every feature it has: the table that the parity test enumerates.

A row is a tiny config that turns on all features of its family, and for each feature the mutant
that switches it off. A new family joins the test by its row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import transformers
from tests.models import mutants as no
from tests.models import state_rows as states

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.models.mutants import Mutant

LAYERS = 3
VOCABULARY = 128
LENGTHS = (9, 30, 61)
"""Of the prompts."""

SIZES: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model of a family.

    Attributes:
        name: Of the test.
        architecture: The class of transformers that is the reference.
        config: The class of its config.
        fields: Of the config, beside `SIZES`.
        sizes: Those of `SIZES` that the config has, by the names that it has for them.
        mutants: By feature of the family, the spec without it.
        limit: Greatest difference of logits, in their standard deviations.
        types: How many types of tokens the model tells apart; 0: it knows of none.
        idle: Endings of tensors that change nothing.
        by_token: The reference computes token after token over its own cache, as it writes.
    """

    name: str
    architecture: type[transformers.PreTrainedModel]
    config: type[transformers.PreTrainedConfig]
    fields: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, object] = field(default_factory=lambda: SIZES)
    mutants: Mapping[str, Mutant] = field(default_factory=dict)
    limit: float = 2e-5
    types: int = 0
    idle: tuple[str, ...] = ()
    by_token: bool = False

    def __str__(self) -> str:
        return self.name

    def made(self) -> transformers.PreTrainedConfig:
        """The config of the tiny model."""
        return self.config.from_dict({**self.sizes, **self.fields})


WITHOUT_KV_HEADS = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"}
GPT2_SIZES: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UPPER_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
WINDOWS_IN_TURN = ["sliding_attention", "full_attention", "sliding_attention"]
PAIRS = 6
"""That Phi's heads of 16 rotate, at a part of three quarters."""


def stretched(kind: str, **fields: object) -> Mapping[str, object]:
    """A rotation that was stretched."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **fields}}


def long_rope(trained: int, partial: float = 0.75) -> Mapping[str, object]:
    """Phi's rotation of a model trained with so many tokens, of 256."""
    short = [1.0 + 0.1 * pair for pair in range(PAIRS)]
    return {
        "original_max_position_embeddings": trained,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": partial,
            "original_max_position_embeddings": trained,
            "short_factor": short,
            "long_factor": [3 * factor for factor in short],
        },
    }


GEMMA_MUTANTS: Mapping[str, Mutant] = {
    "norms of 1 + weight": no.one_plus,
    "tanh GELU": no.tanh,
    "scaled embedding": no.scaled_embedding,
}
SANDWICH_MUTANTS: Mapping[str, Mutant] = {
    **GEMMA_MUTANTS,
    "sandwich norms": no.norms_after,
    "attention scale": no.scale_of_scores,
    "window": no.windows,
}

ROWS = (
    Row(
        name="llama",
        architecture=transformers.LlamaForCausalLM,
        config=transformers.LlamaConfig,
        fields={
            "attention_bias": True,
            "mlp_bias": True,
            **stretched(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
        mutants={"biases": no.biases, "rope scaling": no.rope_scaling},
    ),
    Row(
        name="llama with linear rope",
        architecture=transformers.LlamaForCausalLM,
        config=transformers.LlamaConfig,
        fields=stretched("linear", factor=3.0),
        mutants={"rope scaling": no.rope_scaling},
    ),
    Row(
        name="llama with dynamic rope",
        architecture=transformers.LlamaForCausalLM,
        config=transformers.LlamaConfig,
        fields={**stretched("dynamic", factor=3.0), "max_position_embeddings": 32},
        mutants={"rope scaling": no.rope_scaling},
        by_token=True,
    ),
    Row(
        name="llama with yarn rope",
        architecture=transformers.LlamaForCausalLM,
        config=transformers.LlamaConfig,
        fields=stretched("yarn", factor=4.0, original_max_position_embeddings=64),
        mutants={"rope scaling": no.rope_scaling},
    ),
    Row(
        name="llama with yarn rope in full",
        architecture=transformers.LlamaForCausalLM,
        config=transformers.LlamaConfig,
        fields=stretched(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.4,
            mscale_all_dim=0.7,
            truncate=False,
        ),
        mutants={"rope scaling": no.rope_scaling},
    ),
    Row(
        name="mistral",
        architecture=transformers.MistralForCausalLM,
        config=transformers.MistralConfig,
        fields={"sliding_window": 20, "head_dim": 24},
        mutants={"window": no.windows},
    ),
    Row(
        name="qwen2",
        architecture=transformers.Qwen2ForCausalLM,
        config=transformers.Qwen2Config,
        fields=UPPER_WINDOWS,
        mutants={"biases": no.biases, "window": no.windows},
    ),
    Row(
        name="qwen3",
        architecture=transformers.Qwen3ForCausalLM,
        config=transformers.Qwen3Config,
        fields={"attention_bias": True, "head_dim": 32, **UPPER_WINDOWS},
        mutants={"biases": no.biases, "qk-norm": no.qk_norm, "window": no.windows},
    ),
    Row(
        name="smollm3",
        architecture=transformers.SmolLM3ForCausalLM,
        config=transformers.SmolLM3Config,
        fields={
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "mlp_bias": True,
        },
        mutants={
            "NoPE layers": no.unrotated_layers,
            "biases": no.biases,
            "window": no.windows,
        },
    ),
    Row(
        name="gemma",
        architecture=transformers.GemmaForCausalLM,
        config=transformers.GemmaConfig,
        fields={"head_dim": 32},
        mutants=GEMMA_MUTANTS,
    ),
    Row(
        name="gemma2",
        architecture=transformers.Gemma2ForCausalLM,
        config=transformers.Gemma2Config,
        fields={
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
        mutants={
            **SANDWICH_MUTANTS,
            "capped scores": no.capped_scores,
            "capped logits": no.capped_logits,
        },
    ),
    Row(
        name="gemma3",
        architecture=transformers.Gemma3ForCausalLM,
        config=transformers.Gemma3TextConfig,
        fields={
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 20,
            "layer_types": WINDOWS_IN_TURN,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        mutants={
            **SANDWICH_MUTANTS,
            "qk-norm": no.qk_norm,
            "local RoPE": no.local_rotation,
        },
        # Norms of norms: in float32 the reference itself is 2.4e-5 off its own logits in float64,
        # and we are 2.9e-5 off those, and up to 2.2e-5 off the reference.
        limit=4e-5,
    ),
    Row(
        name="phi",
        architecture=transformers.PhiForCausalLM,
        config=transformers.PhiConfig,
        fields={"qk_layernorm": True},
        mutants={
            "biases": no.biases,
            "biased head": no.biased_head,
            "parallel blocks": no.parallel_parts,
            "partial RoPE": no.partial_rotation,
            "qk-norm": no.qk_norm,
        },
    ),
    Row(
        name="phi3",
        architecture=transformers.Phi3ForCausalLM,
        config=transformers.Phi3Config,
        fields={**long_rope(trained=8), "sliding_window": 20},
        mutants={
            "partial RoPE": no.partial_rotation,
            "rope scaling": no.rope_scaling,
            "window": no.windows,
        },
    ),
    Row(
        name="phi3 that was not stretched",
        architecture=transformers.Phi3ForCausalLM,
        config=transformers.Phi3Config,
        fields=long_rope(trained=256),
        mutants={"rope scaling": no.rope_scaling},
    ),
    Row(
        name="glm4",
        architecture=transformers.Glm4ForCausalLM,
        config=transformers.Glm4Config,
        fields={"head_dim": 32, "rms_norm_eps": 1e-5},
        mutants={
            "biases": no.biases,
            "interleaved RoPE": no.neighbouring_pairs,
            "partial RoPE": no.partial_rotation,
            "sandwich norms": no.norms_after,
        },
    ),
    Row(
        name="olmo2",
        architecture=transformers.Olmo2ForCausalLM,
        config=transformers.Olmo2Config,
        fields={"attention_bias": True},
        mutants={
            "biases": no.biases,
            "qk-norm": no.qk_norm,
            "output norms only": no.norms_after,
        },
    ),
    Row(
        name="granite",
        architecture=transformers.GraniteForCausalLM,
        config=transformers.GraniteConfig,
        fields={
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
        mutants={
            "biases": no.biases,
            "attention scale": no.scale_of_scores,
            "residual multiplier": no.scaled_parts,
            "scaled embedding": no.scaled_embedding,
            "scaled logits": no.scaled_logits,
        },
    ),
    Row(
        name="starcoder2",
        architecture=transformers.Starcoder2ForCausalLM,
        config=transformers.Starcoder2Config,
        fields={"sliding_window": 20},
        mutants={
            "biases": no.biases,
            "layer norms": no.layer_norms,
            "window": no.windows,
        },
    ),
    Row(
        name="gpt neox",
        architecture=transformers.GPTNeoXForCausalLM,
        config=transformers.GPTNeoXConfig,
        sizes=WITHOUT_KV_HEADS,
        mutants={
            "biases": no.biases,
            "layer norms": no.layer_norms,
            "parallel blocks": no.parallel_parts,
            "partial RoPE": no.partial_rotation,
        },
    ),
    Row(
        name="gpt neox in sequence",
        architecture=transformers.GPTNeoXForCausalLM,
        config=transformers.GPTNeoXConfig,
        sizes=WITHOUT_KV_HEADS,
        fields={"use_parallel_residual": False},
    ),
    Row(
        name="gpt2",
        architecture=transformers.GPT2LMHeadModel,
        config=transformers.GPT2Config,
        sizes=GPT2_SIZES,
        mutants={
            "biases": no.biases,
            "layer norms": no.layer_norms,
            "learned positions": no.learned_positions,
        },
    ),
    Row(
        name="falcon-h1",
        architecture=transformers.FalconH1ForCausalLM,
        config=transformers.FalconH1Config,
        fields={
            **states.FALCON,
            **states.SCALES,
            **states.BIASES,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "time_step_limit": [0.4, 0.9],
        },
        mutants={**states.FALCON_MUTANTS, "gate before the norm": states.gate_last},
        limit=states.LIMIT,
    ),
    Row(
        name="falcon-h1 with a gate behind the norm",
        architecture=transformers.FalconH1ForCausalLM,
        config=transformers.FalconH1Config,
        fields={**states.FALCON, "mamba_rms_norm": True},
        mutants={"gate behind the norm": states.gate_first},
        limit=states.LIMIT,
    ),
    Row(
        name="falcon-h1 without a norm",
        architecture=transformers.FalconH1ForCausalLM,
        config=transformers.FalconH1Config,
        fields={**states.FALCON, "mamba_n_groups": 1, "mamba_conv_bias": False},
        limit=states.LIMIT,
    ),
    Row(
        name="qwen3-next",
        architecture=transformers.Qwen3NextForCausalLM,
        config=transformers.Qwen3NextConfig,
        fields=states.QWEN,
        mutants=states.QWEN_MUTANTS,
        limit=states.LIMIT,
    ),
)
