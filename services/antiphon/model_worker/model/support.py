"""Attention kinds and quantization formats of a family, found by building a small model.

The model comes from the family's own declaration, and the refusals from the code that loads models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from antiphon.config.quantization import ROUTERS
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.gated_delta import GatedDeltaSpec
from antiphon.layers.mamba2 import Mamba2Spec
from antiphon.layers.methods import METHODS
from antiphon.layers.mla import LatentSpec
from antiphon.layers.tp import SingleRank
from antiphon.layers.weights import BuildContext
from antiphon.model_card.config_json import complete_config
from antiphon.model_card.quantization_config import read_quantization
from antiphon.model_worker.model.config_file import ConfigFile
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.llama_parts import read_spec
from antiphon.model_worker.model.quantization import StoredLinears
from antiphon.model_worker.model.registry import find_family
from antiphon.model_worker.model.spec import HeadSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.model_worker.model.spec import ModelSpec

_COUNTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "mamba_n_heads": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "routed_scaling_factor": 1.0,
    "pad_token_id": 0,
}
_SIZES = {
    "vocab_size": 32,
    "max_position_embeddings": 256,
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "sliding_window": 64,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "query_pre_attn_scalar": 64,
}
SAMPLE: Mapping[str, object] = {
    **_COUNTS,
    **_SIZES,
    "norm_topk_prob": False,
    "topk_method": "greedy",
}
"""Fields of all families, in sizes of whole groups and blocks; each family reads its own."""
STORED: Mapping[str, Mapping[str, object]] = {
    "fp8": {"weight_block_size": [128, 128]},
    "w8a8_int8": {},
    "awq": {"bits": 4, "group_size": 32},
    "gptq": {"bits": 4, "group_size": 32},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
        },
    },
    "mxfp4": {},
    "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
}
"""A quantization config by `quant_method`."""
_KINDS: tuple[tuple[type, str], ...] = (
    (AttentionSpec, "grouped-query"),
    (LatentSpec, "latent"),
    (Mamba2Spec, "Mamba 2"),
    (GatedDeltaSpec, "gated delta net"),
)


def sample(architecture: str) -> ModelSpec:
    """A small model of an architecture."""
    fields = {**SAMPLE, "architectures": [architecture]}
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    encoded = msgspec.json.encode(complete_config(raw))
    config = msgspec.structs.replace(msgspec.json.decode(encoded, type=ConfigFile), raw=encoded)
    return read_spec(find_family((architecture,)), config)


def attention(spec: ModelSpec) -> str:
    """The attention and recurrence kinds of a model."""
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    found = [name for kind, name in _KINDS if any(isinstance(one, kind) for one in mixers)]
    return ", ".join(found) + ("" if spec.causal else ", bidirectional")


def refusal(spec: ModelSpec, method: str) -> str | None:
    """Why a checkpoint with this `quant_method` cannot be loaded, or None."""
    config = {"quantization_config": {"quant_method": method, **STORED[method]}}
    quantization = read_quantization(msgspec.json.encode(config))
    assert quantization is not None
    # No tool quantizes routers: a gate of one output cannot even be packed.
    quantization = msgspec.structs.replace(quantization, plain=(*quantization.plain, ROUTERS))
    head = spec.head.name if isinstance(spec.head, HeadSpec) else None
    plain = METHODS["plain"]
    stored = StoredLinears(quantization, plain, spec.embedding.name, head)
    build = BuildContext(SingleRank(), torch.float32, torch.device("cpu"), stored)
    as_numbers = {source.name for source in Decoder(spec, _plain(), method=plain).sources()}
    try:
        names = {source.name for source in Decoder(spec, build, method=plain).sources()}
    except ValueError as error:
        return str(error).rpartition(": ")[2]
    # Byte formats may keep the name of the weight and add a tensor for its scales.
    return None if names - as_numbers else "none of its linears is stored so"


def _plain() -> BuildContext:
    return BuildContext(SingleRank(), torch.float32, torch.device("cpu"))
