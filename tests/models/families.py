"""Every family of models and every feature it has: the table that the parity test enumerates.

A row is a tiny config that turns on all features of its family; `derived` finds them in its spec,
with the mutants that switch them off. A new family joins the test by its row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

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


@dataclass(frozen=True)
class Row:
    """One model of a family.

    Attributes:
        name: Of the test.
        architecture: The class of transformers that is the reference.
        fields: Of the config, beside `SIZES`.
        sizes: Those of `SIZES` that the config has, by the names that it has for them.
        limit: Greatest difference of logits, in their standard deviations.
        types: How many types of tokens the model distinguishes; 0: it knows of none.
        idle: Endings of tensors that change nothing.
        turned: Endings of tensors whose last two dimensions published files have in another order
            than transformers writes them.
        again: Its text model is that of another row, under other names: here what that row proves
            is only proven again by `-m long`.
        by_token: The reference computes token after token over its own cache, as it writes.
        write: Writes the model under the names of published files, where transformers' are others.
    """

    name: str
    architecture: type[transformers.PreTrainedModel]
    fields: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, object] = field(default_factory=lambda: SIZES)
    limit: float = 2e-5
    types: int = 0
    idle: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    again: bool = False
    by_token: bool = False
    write: Callable[[Any, Path], object] | None = None

    def __str__(self) -> str:
        return self.name

    def made(self) -> transformers.PreTrainedConfig:
        """The config of the tiny model."""
        return self.config.from_dict({**self.sizes, **self.fields})

    @property
    def config(self) -> type[transformers.PreTrainedConfig]:
        config = self.architecture.config_class
        assert config is not None
        return config


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


LLAMA3_ROPE = stretched(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


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


UNSCALED_LIMIT = 2e-3
"""Scores are not scaled and softmax saturates: transformers' float32 is 3e-4 from its float64."""
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
STREAMS_LIMIT = 1e-4
"""Neither are these scores scaled; transformers' float32 is 2e-5 from its float64."""
GEMMA3N = {
    "head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY - 8,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 3,
    "laurel_rank": 8,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "intermediate_size": [96, 96, 64, 64, 96, 64],
    "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.0, 0.5, 0.0],
}
FOUR_LAYERS = {**SIZES, "num_hidden_layers": 4}

STATE_LIMIT = 5e-5
"""Chunks sum in another order than those of transformers; measured, 1.4e-5."""

FALCON = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}
FALCON_SCALES = {
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
FALCON_BIASES = {
    "attention_bias": True,
    "mlp_bias": True,
    "mamba_conv_bias": True,
    "mamba_proj_bias": True,
    "projectors_bias": True,
}


QWEN_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "attention_bias": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    **stretched("default", partial_rotary_factor=0.25),
}
QWEN_NEXT = {
    **QWEN_HYBRID,
    "mlp_only_layers": [0, 1, 2],
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

ROWS = (
    Row(
        "llama",
        transformers.LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, **LLAMA3_ROPE},
    ),
    Row("llama with linear rope", transformers.LlamaForCausalLM, stretched("linear", factor=3.0)),
    Row(
        "llama with dynamic rope",
        transformers.LlamaForCausalLM,
        {**stretched("dynamic", factor=3.0), "max_position_embeddings": 32},
        by_token=True,
    ),
    Row(
        "llama with yarn rope",
        transformers.LlamaForCausalLM,
        stretched("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    Row(
        "llama with yarn rope in full",
        transformers.LlamaForCausalLM,
        stretched(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.4,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    ),
    Row("mistral", transformers.MistralForCausalLM, {"sliding_window": 20, "head_dim": 24}),
    Row("qwen2", transformers.Qwen2ForCausalLM, UPPER_WINDOWS),
    Row(
        "qwen3",
        transformers.Qwen3ForCausalLM,
        {"attention_bias": True, "head_dim": 32, **UPPER_WINDOWS},
    ),
    Row(
        "smollm3",
        transformers.SmolLM3ForCausalLM,
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    Row("gemma", transformers.GemmaForCausalLM, {"head_dim": 32}),
    Row(
        "gemma2",
        transformers.Gemma2ForCausalLM,
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    Row(
        "gemma3",
        transformers.Gemma3ForCausalLM,
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 20,
            "layer_types": WINDOWS_IN_TURN,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        limit=4e-5,
    ),
    Row(
        "gemma4",
        transformers.Gemma4ForCausalLM,
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
        },
        sizes={**SIZES, "num_hidden_layers": 6},
        limit=UNSCALED_LIMIT,
    ),
    Row(
        "gemma4 with experts and values that are keys",
        transformers.Gemma4ForCausalLM,
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        sizes=FOUR_LAYERS,
        limit=UNSCALED_LIMIT,
    ),
    Row(
        "gemma3n",
        transformers.Gemma3nForCausalLM,
        {
            **GEMMA3N,
            "num_kv_shared_layers": 2,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
        },
        sizes={**SIZES, "num_hidden_layers": 6},
        limit=STREAMS_LIMIT,
    ),
    Row(
        "gemma3n with two streams of which the second is active",
        transformers.Gemma3nForCausalLM,
        {
            **GEMMA3N,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 2,
            "altup_active_idx": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": 96,
            "activation_sparsity_pattern": [0.0, 0.5, 0.0, 0.95],
        },
        sizes=FOUR_LAYERS,
        limit=STREAMS_LIMIT,
    ),
    Row("phi", transformers.PhiForCausalLM, {"qk_layernorm": True}),
    Row("phi3", transformers.Phi3ForCausalLM, {**long_rope(trained=8), "sliding_window": 20}),
    Row("phi3 that was not stretched", transformers.Phi3ForCausalLM, long_rope(trained=256)),
    Row("glm4", transformers.Glm4ForCausalLM, {"head_dim": 32, "rms_norm_eps": 1e-5}),
    Row("olmo2", transformers.Olmo2ForCausalLM, {"attention_bias": True}),
    Row(
        "granite",
        transformers.GraniteForCausalLM,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    Row("starcoder2", transformers.Starcoder2ForCausalLM, {"sliding_window": 20}),
    Row("gpt neox", transformers.GPTNeoXForCausalLM, sizes=WITHOUT_KV_HEADS),
    Row(
        "gpt neox in sequence",
        transformers.GPTNeoXForCausalLM,
        {"use_parallel_residual": False},
        sizes=WITHOUT_KV_HEADS,
    ),
    Row("gpt2", transformers.GPT2LMHeadModel, sizes=GPT2_SIZES),
    Row(
        "falcon-h1",
        transformers.FalconH1ForCausalLM,
        {
            **FALCON,
            **FALCON_SCALES,
            **FALCON_BIASES,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "time_step_limit": [0.4, 0.9],
        },
        limit=STATE_LIMIT,
    ),
    Row(
        "falcon-h1 with a gate behind the norm",
        transformers.FalconH1ForCausalLM,
        {**FALCON, "mamba_rms_norm": True},
        limit=STATE_LIMIT,
    ),
    Row(
        "falcon-h1 without a norm",
        transformers.FalconH1ForCausalLM,
        {**FALCON, "mamba_n_groups": 1, "mamba_conv_bias": False},
        limit=STATE_LIMIT,
    ),
    Row("qwen3-next", transformers.Qwen3NextForCausalLM, QWEN_NEXT, limit=STATE_LIMIT),
    Row("qwen3.5", transformers.Qwen3_5ForCausalLM, QWEN_HYBRID, limit=STATE_LIMIT),
)
