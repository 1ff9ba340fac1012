"""Published models that workers are recorded with, as far as kernels depend on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A published model, as far as kernels depend on it.

    Attributes:
        width: Of the feed-forward block, or of an expert.
        heads: Query heads, kv heads, and elements of a head.
        window: Of every second layer.
        experts: Their number, and how many a token has.
        fp8: How weights in fp8 are made, for a worker that has some: with a scale for an output
            while loading, or with one for a block of 128 x 128, as stored.
        grouped: What config.json says of weights in groups, for a worker that has some.
        ranks: Of a worker. No GPU has the memory for a model with several.
        fields: Those of its config.json that are not here.
    """

    hidden: int
    width: int
    heads: tuple[int, int, int]
    vocabulary: int
    layers: int
    window: int | None = None
    experts: tuple[int, int] | None = None
    fp8: Literal["online", "block"] | None = None
    grouped: Mapping[str, Any] | None = None
    ranks: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def latent(self) -> bool:
        """Whether it caches latents."""
        return "kv_lora_rank" in self.fields

    @property
    def recurrent(self) -> bool:
        """Whether it has gated delta nets."""
        return "linear_num_value_heads" in self.fields

    @property
    def routed(self) -> tuple[int, int] | None:
        """Its experts as `experts`, where its config.json names them in its own way, too."""
        if "n_routed_experts" not in self.fields:
            return self.experts
        return self.fields["n_routed_experts"], self.fields["num_experts_per_tok"]

    def config(self, layers: int) -> dict[str, Any]:
        """Its config.json, with so many layers."""
        queries, kv_heads, size = self.heads
        said: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "num_hidden_layers": layers,
            "num_attention_heads": queries,
            "num_key_value_heads": kv_heads,
            "head_dim": size,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.window is not None:
            kinds = ["sliding_attention", "full_attention"] * layers
            said |= {"sliding_window": self.window, "layer_types": kinds[:layers]}
        if self.experts is not None:
            count, chosen = self.experts
            said |= {"num_experts": count, "num_experts_per_tok": chosen}
        return {**said, **self.fields}


MODELS = {
    "Llama-3.1-8B": Sizes(
        hidden=4096,
        width=14336,
        heads=(32, 8, 128),
        vocabulary=128256,
        layers=32,
        fp8="online",
        grouped={"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        fields={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
    ),
    "gemma-2-9b": Sizes(
        hidden=3584,
        width=14336,
        heads=(16, 8, 256),
        vocabulary=256000,
        layers=42,
        window=4096,
        fields={
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-30B-A3B": Sizes(
        hidden=2048,
        width=768,
        heads=(32, 4, 128),
        vocabulary=151936,
        layers=48,
        experts=(128, 8),
        fp8="block",
        fields={
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "rope_theta": 1000000.0,
        },
    ),
    "gpt-oss-20b": Sizes(
        hidden=2880,
        width=2880,
        heads=(64, 8, 64),
        vocabulary=201088,
        layers=24,
        window=128,
        experts=(32, 4),
        fp8="online",
        grouped={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
        },
        fields={
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "rope_theta": 150000.0,
        },
    ),
    "DeepSeek-V3": Sizes(
        hidden=7168,
        width=18432,
        heads=(128, 128, 192),
        vocabulary=129280,
        layers=61,
        fp8="block",
        ranks=8,
        fields={
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 163840,
            "first_k_dense_replace": 1,  # of 3, so that two layers have one of each kind
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}

RECURRENT_MODELS = {
    "Qwen3-Next-80B-A3B": Sizes(
        hidden=2048,
        width=5120,
        heads=(16, 2, 256),
        vocabulary=151936,
        layers=48,
        experts=(512, 10),
        fields={
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "full_attention_interval": 4,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000000.0,
        },
    ),
}
"""With states, whose steps are not recorded: of what they launch, some shapes are compiled."""
