"""What config.json leaves unsaid: old names of its fields, and values that are its family's habit.

A file written by transformers leaves out what is the default of its model's class, and old
families have names of their own. Whoever reads a config reads it through `completed`, so that the
plan and the decoder cannot disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

Fields = dict[str, msgspec.Raw]

NAMES: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "hidden_activation": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
}
"""What some families call a field, and what most do."""

_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}
HABITS: Mapping[str, Mapping[str, bool | float | str]] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "rope_theta": 1e6},
    "glm4": {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True},
    "gpt2": {"tie_word_embeddings": True, "hidden_act": "gelu_new"},
    "gpt_neox": {"partial_rotary_factor": 0.25, "hidden_act": "gelu", "attention_bias": True},
    "phi": {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    "qwen3": {"head_dim": 128},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2e6},
    "starcoder2": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
}
"""By `model_type`: what holds where the file is silent, and is not what holds in most families."""

UNGATED = frozenset({"gpt2", "gpt_neox", "phi", "starcoder2"})
"""Families whose feed-forward blocks have two linears, not three."""
PLACED = frozenset({"gpt2"})
"""Families that learn a vector for each position."""


def completed(config: Fields) -> Fields:
    """A config with the names that most families have, and with the habits of its own."""
    renamed = {NAMES[name]: config[name] for name in config if name in NAMES}
    said = {name: value for name, value in {**renamed, **config}.items() if bytes(value) != b"null"}
    model_type = bytes(said.get("model_type", b"")).decode().strip('"')
    habits = HABITS.get(model_type, {})
    added = {name: msgspec.Raw(msgspec.json.encode(habits[name])) for name in habits}
    return added | said
