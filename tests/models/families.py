"""Every family of models and every feature it has: the table that the parity test enumerates.

A row is a tiny config that turns on all features of its family, and for each feature the mutant
that switches it off. A new family joins the test by its row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import transformers
from tests.models.specs import fed, mixed, windowed

from antiphon.model_worker.model.spec import ModelSpec

Mutant = Callable[[ModelSpec], ModelSpec]

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
    """

    name: str
    architecture: type[transformers.PreTrainedModel]
    config: type[transformers.PreTrainedConfig]
    fields: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, object] = field(default_factory=lambda: SIZES)
    mutants: Mapping[str, Mutant] = field(default_factory=dict)
    limit: float = 2e-5

    def __str__(self) -> str:
        return self.name

    def made(self) -> transformers.PreTrainedConfig:
        """The config of the tiny model."""
        return self.config.from_dict({**self.sizes, **self.fields})


def no_biases(spec: ModelSpec) -> ModelSpec:
    """No linear with a bias."""
    return fed(mixed(spec, qkv_bias=False, out_bias=False), bias=False)


def no_windows(spec: ModelSpec) -> ModelSpec:
    """Every layer sees every token."""
    return windowed(spec, (None,) * len(spec.layers))


def no_qk_norm(spec: ModelSpec) -> ModelSpec:
    """Queries and keys as they are projected."""
    return mixed(spec, qk_norm=None)


def no_rope_scaling(spec: ModelSpec) -> ModelSpec:
    """The rotation before it was stretched."""
    rotary = spec.layers[0].mixer.rotary
    assert rotary is not None
    return mixed(spec, rotary=replace(rotary, scaling=None))


UPPER_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}

ROWS = (
    Row(
        name="llama",
        architecture=transformers.LlamaForCausalLM,
        config=transformers.LlamaConfig,
        fields={
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        mutants={"biases": no_biases, "rope scaling": no_rope_scaling},
    ),
    Row(
        name="qwen2",
        architecture=transformers.Qwen2ForCausalLM,
        config=transformers.Qwen2Config,
        fields=UPPER_WINDOWS,
        mutants={"biases": no_biases, "window": no_windows},
    ),
    Row(
        name="qwen3",
        architecture=transformers.Qwen3ForCausalLM,
        config=transformers.Qwen3Config,
        fields={"attention_bias": True, "head_dim": 32, **UPPER_WINDOWS},
        mutants={"biases": no_biases, "qk-norm": no_qk_norm, "window": no_windows},
    ),
)
