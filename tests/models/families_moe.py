"""Rows of the families with experts and of those with latent attention; see `families`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers
from tests.models.families import (
    LLAMA3_ROPE,
    QWEN_HYBRID,
    QWEN_NEXT,
    SIZES,
    STATE_LIMIT,
    WINDOWS_IN_TURN,
    Row,
    stretched,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPERTS: Mapping[str, object] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SHARED_EXPERT: Mapping[str, object] = {**EXPERTS, "shared_expert_intermediate_size": 48}
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

ROWS = (
    Row(
        "mixtral",
        transformers.MixtralForCausalLM,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 20},
    ),
    Row(
        "qwen2-moe",
        transformers.Qwen2MoeForCausalLM,
        {
            **SHARED_EXPERT,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": WINDOWS_IN_TURN,
        },
    ),
    Row(
        "qwen2-moe without windows",
        transformers.Qwen2MoeForCausalLM,
        {**SHARED_EXPERT, "norm_topk_prob": True},
    ),
    Row(
        "qwen3-moe",
        transformers.Qwen3MoeForCausalLM,
        {
            **EXPERTS,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    Row(
        "qwen3-next with experts",
        transformers.Qwen3NextForCausalLM,
        {**QWEN_NEXT, **SHARED_EXPERT, "norm_topk_prob": True, "mlp_only_layers": [0]},
        limit=STATE_LIMIT,
    ),
    Row(
        "qwen3.5 with experts",
        transformers.Qwen3_5MoeForCausalLM,
        # With an eps of 1e-6 transformers itself is 4e-4 from float64 where a head is near zero.
        {**QWEN_HYBRID, **SHARED_EXPERT, "num_experts": 4, "rms_norm_eps": 1e-3},
        sizes={name: SIZES[name] for name in SIZES if name != "intermediate_size"},
        limit=STATE_LIMIT,
    ),
    Row(
        "glm4-moe",
        transformers.Glm4MoeForCausalLM,
        {
            **GROUPED,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            **stretched("default", partial_rotary_factor=0.5),
        },
    ),
    Row(
        "gpt-oss",
        transformers.GptOssForCausalLM,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 20,
            "swiglu_limit": 0.5,
            **stretched("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
    ),
    Row(
        "llama4",
        transformers.Llama4ForCausalLM,
        {**LLAMA4, **LLAMA3_ROPE},
    ),
    Row(
        "llama4 with two experts a token and no norms of heads",
        transformers.Llama4ForCausalLM,
        {
            **LLAMA4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "moe_layers": None,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    ),
    Row(
        "deepseek-v2",
        transformers.DeepseekV2ForCausalLM,
        {**GROUPED, **LATENT, "topk_method": "group_limited_greedy"},
    ),
    Row(
        "deepseek-v2 without groups and bottleneck",
        transformers.DeepseekV2ForCausalLM,
        {**GROUPED, **LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.0},
    ),
    Row(
        "deepseek-v3",
        transformers.DeepseekV3ForCausalLM,
        {**GROUPED, **LATENT, "attention_bias": True},
    ),
    Row(
        "deepseek-v3 with halves rotated",
        transformers.DeepseekV3ForCausalLM,
        {**GROUPED, **LATENT, "rope_interleave": False, "v_head_dim": 24},
    ),
)
