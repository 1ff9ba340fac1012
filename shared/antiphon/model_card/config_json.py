"""Completes config.json: old names of its fields, and the defaults of its model family.

A file written by transformers omits the defaults of its model class, and old families have names of
their own. All readers of a config use `complete_config`, so that the plan and the decoder cannot
disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Fields = dict[str, msgspec.Raw]

FIELD_ALIASES: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "hidden_activation": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
    "norm_eps": "layer_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "kv_channels": "head_dim",
}
"""Names of fields in some families, and in most."""

_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}
_BERT = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
FAMILY_DEFAULTS: Mapping[str, Mapping[str, bool | float | str]] = {
    "bert": {**_BERT, "pad_token_id": 0},
    "deepseek_v2": {"topk_method": "greedy"},
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": {
        **_GEMMA,
        "rope_theta": 1e6,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "gemma4_text": {**_GEMMA, "global_head_dim": 512},
    "glm4": {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True},
    "gpt2": {"tie_word_embeddings": True, "hidden_act": "gelu_new"},
    "gpt_neox": {"partial_rotary_factor": 0.25, "hidden_act": "gelu", "attention_bias": True},
    "llama4_text": {
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "n_shared_experts": 1,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    },
    "modernbert": {"hidden_act": "gelu"},
    "phi": {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    "qwen3": {"head_dim": 128},
    "roberta": {**_BERT, "pad_token_id": 1},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2e6},
    "xlm-roberta": {**_BERT, "pad_token_id": 1},
    "starcoder2": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
}
"""By `model_type`: defaults of unset fields that differ from those of most families."""

_ONE_HEAD_COUNT = ("num_key_value_heads", "head_dim")
IGNORED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "bert": _ONE_HEAD_COUNT,
    "gpt2": (*_ONE_HEAD_COUNT, "intermediate_size"),
    "gpt_neox": ("num_key_value_heads",),
    "modernbert": ("num_key_value_heads",),
    "roberta": _ONE_HEAD_COUNT,
    "xlm-roberta": _ONE_HEAD_COUNT,
}
"""By `model_type`: fields that transformers ignores for a family, although tools write them."""

UNGATED_MLP = frozenset({"bert", "gpt2", "gpt_neox", "phi", "roberta", "starcoder2", "xlm-roberta"})
"""Families whose feed-forward blocks have two linear layers, not three."""
LEARNED_POSITIONS = frozenset({"bert", "gpt2", "roberta", "xlm-roberta"})
"""Families with learned position embeddings."""
PADDED_POSITIONS = frozenset({"roberta", "xlm-roberta"})
"""Families whose positions start after the padding position, which is the padding token's id."""
REPEATED_KV = frozenset({"jetmoe"})
"""Families that pass each key to attention once per expert of a token, and cache it as often."""


def complete_config(config: Fields) -> Fields:
    """The config with the common field names and the defaults of its family."""
    model_type = bytes(config.get("model_type", b"")).decode().strip('"')
    unread = IGNORED_FIELDS.get(model_type, ())
    read = {name: value for name, value in config.items() if name not in unread}
    renamed = {FIELD_ALIASES[name]: read[name] for name in read if name in FIELD_ALIASES}
    given = {name: value for name, value in {**renamed, **read}.items() if bytes(value) != b"null"}
    habits = FAMILY_DEFAULTS.get(model_type, {})
    added = {name: msgspec.Raw(msgspec.json.encode(habits[name])) for name in habits}
    return added | given


_SHAPE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "max_position_embeddings",
)


def check_shape(config: bytes, file: Path) -> None:
    """Check that a completed config has the fields of every supported model.

    Raises:
        ConfigError: Fields are missing; the message names them and the model type.
    """
    fields = msgspec.json.decode(config, type=dict[str, msgspec.Raw])
    missing = [name for name in _SHAPE if name not in fields]
    if missing:
        model_type = bytes(fields.get("model_type", b"")).decode().strip('"') or "none"
        raise ConfigError(
            f"{file}: {', '.join(missing)} missing: models of type {model_type} lack this field "
            "or use another name for it, and are not supported"
        )
