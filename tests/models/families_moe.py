"""Rows of the families with experts and of those with latent attention; see `families`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers
from tests.models import mutants as no
from tests.models import mutants_moe as no_moe
from tests.models import state_rows as states
from tests.models.families import WINDOWS_IN_TURN, Row, stretched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.models.mutants import Mutant

GROUPED: Mapping[str, object] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
CORRECTED: Mapping[str, Mutant] = {
    "shared expert": no_moe.shared_block,
    "scaling": no_moe.scaling,
    "groups": no_moe.groups,
    "sigmoid scores": no_moe.sigmoid_scores,
    "correction": no_moe.correction,
    "groups by their two best": no_moe.two_best,
    "normalised top-k weights": no_moe.renormalised,
}
LLAMA4: Mapping[str, object] = {
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 6,
    "moe_layers": [1, 2],
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 20,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "attention_bias": True,
}
LATENT: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    **stretched(
        "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7
    ),
}
LATENT_MUTANTS: Mapping[str, Mutant] = {
    "rope scaling": no.rope_scaling,
    "mscale": no_moe.grown_scores,
    "interleaved RoPE": no.neighbouring_pairs,
}

ROWS = (
    Row(
        name="mixtral",
        architecture=transformers.MixtralForCausalLM,
        config=transformers.MixtralConfig,
        fields={"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 20},
        mutants={"normalised top-k weights": no_moe.renormalised, "window": no.windows},
    ),
    Row(
        name="qwen2-moe",
        architecture=transformers.Qwen2MoeForCausalLM,
        config=transformers.Qwen2MoeConfig,
        fields={
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": WINDOWS_IN_TURN,
        },
        mutants={
            "biases": no_moe.biases,
            "window": no.windows,
            "shared expert": no_moe.shared_block,
            "shared gate": no_moe.shared_gate,
            "unnormalised top-k weights": no_moe.plain_shares,
        },
    ),
    Row(
        name="qwen2-moe without windows",
        architecture=transformers.Qwen2MoeForCausalLM,
        config=transformers.Qwen2MoeConfig,
        fields={
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
        },
        mutants={"normalised top-k weights": no_moe.renormalised},
    ),
    Row(
        name="qwen3-moe",
        architecture=transformers.Qwen3MoeForCausalLM,
        config=transformers.Qwen3MoeConfig,
        fields={
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
        mutants={
            "qk-norm": no.qk_norm,
            "biases": no_moe.biases,
            "window": no.windows,
            "normalised top-k weights": no_moe.renormalised,
        },
    ),
    Row(
        name="qwen3-next with experts",
        architecture=transformers.Qwen3NextForCausalLM,
        config=transformers.Qwen3NextConfig,
        fields={
            **states.QWEN,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
        mutants={
            "shared expert": no_moe.shared_block,
            "shared gate": no_moe.shared_gate,
            "normalised top-k weights": no_moe.renormalised,
        },
        limit=states.LIMIT,
    ),
    Row(
        name="glm4-moe",
        architecture=transformers.Glm4MoeForCausalLM,
        config=transformers.Glm4MoeConfig,
        fields={
            **GROUPED,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        },
        mutants={
            "biases": no_moe.biases,
            "qk-norm": no.qk_norm,
            "partial RoPE": no.partial_rotation,
            **CORRECTED,
        },
    ),
    Row(
        name="gpt-oss",
        architecture=transformers.GptOssForCausalLM,
        config=transformers.GptOssConfig,
        fields={
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 20,
            "swiglu_limit": 0.5,
            **stretched("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
        mutants={
            "sinks": no.sinks,
            "window": no.windows,
            "biases": no_moe.biases,
            "rope scaling": no.rope_scaling,
            "expert biases": no_moe.expert_biases,
            "router bias": no_moe.router_bias,
            "normalised top-k weights": no_moe.renormalised,
            "clamped gate": no_moe.clamped_gate,
            "gate alpha": no_moe.sharpened_gate,
            "interleaved gate and up": no_moe.in_turn,
        },
    ),
    Row(
        name="llama4",
        architecture=transformers.Llama4ForCausalLM,
        config=transformers.Llama4TextConfig,
        fields={
            **LLAMA4,
            **stretched(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
        mutants={
            "NoPE layers": no.unrotated_layers,
            "chunked attention": no.runs_of_tokens,
            "temperature": no.temperature,
            "qk-norm": no.qk_norm,
            "interleaved RoPE": no.neighbouring_pairs,
            "rope scaling": no.rope_scaling,
            "biases": no_moe.biases,
            "sigmoid scores": no_moe.sigmoid_scores,
            "router weight on the input": no_moe.weighed_input,
            "shared expert": no_moe.shared_block,
        },
    ),
    Row(
        name="llama4 with two experts a token and no norms of heads",
        architecture=transformers.Llama4ForCausalLM,
        config=transformers.Llama4TextConfig,
        fields={
            **LLAMA4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "moe_layers": None,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
        mutants={"chunked attention": no.runs_of_tokens},
    ),
    Row(
        name="deepseek-v2",
        architecture=transformers.DeepseekV2ForCausalLM,
        config=transformers.DeepseekV2Config,
        fields={**GROUPED, **LATENT, "topk_method": "group_limited_greedy"},
        mutants={
            **LATENT_MUTANTS,
            "shared expert": no_moe.shared_block,
            "scaling": no_moe.scaling,
            "groups": no_moe.groups,
        },
    ),
    Row(
        name="deepseek-v2 without groups and bottleneck",
        architecture=transformers.DeepseekV2ForCausalLM,
        config=transformers.DeepseekV2Config,
        fields={**GROUPED, **LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.0},
        mutants=LATENT_MUTANTS,
    ),
    Row(
        name="deepseek-v3",
        architecture=transformers.DeepseekV3ForCausalLM,
        config=transformers.DeepseekV3Config,
        fields={**GROUPED, **LATENT, "attention_bias": True},
        mutants={**LATENT_MUTANTS, **CORRECTED},
    ),
    Row(
        name="deepseek-v3 with halves rotated",
        architecture=transformers.DeepseekV3ForCausalLM,
        config=transformers.DeepseekV3Config,
        fields={**GROUPED, **LATENT, "rope_interleave": False, "v_head_dim": 24},
    ),
)
