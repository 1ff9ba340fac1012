"""ModernBERT."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.kernels.rotary import RotarySpec
from antiphon.layers.attention import AttentionNames
from antiphon.layers.classification_head import ClassificationHeadSpec, DenseSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_card.tasks import Task, task_of
from antiphon.model_worker.model.config_file import activation_of
from antiphon.model_worker.model.llama_parts import attention, gated, layers, model
from antiphon.model_worker.model.spec import EmbeddingSpec, LayerSpec, ModelFamily, Norms

if TYPE_CHECKING:
    from antiphon.layers.attention import AttentionSpec
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

QKV = "attn.Wqkv"
NAMES = AttentionNames(query=QKV, key=QKV, value=QKV, out="attn.Wo")
FIRST = Norms(before_feed_forward="mlp_norm")
"""The norm of the embedding directly precedes the first layer, which has no own norm there."""
LATER = Norms(before_mixer="attn_norm", before_feed_forward="mlp_norm")


class _ModernBertFields(msgspec.Struct, frozen=True):
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    norm_bias: bool = False
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"


def declare(config: ConfigFile) -> ModelSpec:
    """ModernBERT: a bidirectional encoder with RoPE, gated blocks and windows in most layers."""
    fields = config.family_fields(_ModernBertFields)
    norm = NormSpec(kind="layer", eps=config.layer_norm_eps, bias=fields.norm_bias)
    feed_forward = gated(config, bias=config.mlp_bias, gate="mlp.Wi", up="mlp.Wi", down="mlp.Wo")

    def layer(kind: tuple[int | None, bool]) -> LayerSpec:
        window, first = kind
        return LayerSpec(
            mixer=_mixer(config, fields, window),
            feed_forward=feed_forward,
            norm=norm,
            norms=FIRST if first else LATER,
        )

    kinds = [(window, index == 0) for index, window in enumerate(_windows(config, fields))]
    scores = task_of(config.architectures[0]) is Task.SCORE
    return model(
        config,
        layers(kinds, layer),
        norm_name="model.final_norm",
        embedding=EmbeddingSpec(
            name="model.embeddings.tok_embeddings", norm=norm, norm_name="model.embeddings.norm"
        ),
        head=_head(config, fields, norm) if scores else None,
        pooling=fields.classifier_pooling if scores else "cls",
        prefix="model.",
    )


def _mixer(config: ConfigFile, fields: _ModernBertFields, window: int | None) -> AttentionSpec:
    bias = config.attention_bias
    mixer = attention(config, window=window, bias=bias, causal=False, names=NAMES)
    if config.rope_parameters is not None:
        return mixer
    theta = fields.global_rope_theta if window is None else fields.local_rope_theta
    scaling = None if mixer.rotary is None else mixer.rotary.scaling
    return replace(mixer, rotary=RotarySpec(config.head_size, theta, scaling))


def _windows(config: ConfigFile, fields: _ModernBertFields) -> tuple[int | None, ...]:
    """Half of the config's window on each side, and the token itself."""
    kinds = config.layer_types or tuple(
        "sliding_attention" if index % fields.global_attn_every_n_layers else "full_attention"
        for index in range(config.num_hidden_layers)
    )
    window = fields.local_attention // 2 + 1
    return msgspec.structs.replace(config, layer_types=kinds, sliding_window=window).windows()


def _head(config: ConfigFile, fields: _ModernBertFields, norm: NormSpec) -> ClassificationHeadSpec:
    dense = DenseSpec(
        name="head.dense",
        activation=activation_of(fields.classifier_activation, "classifier_activation"),
        bias=fields.classifier_bias,
        norm=norm,
        norm_name="head.norm",
    )
    return ClassificationHeadSpec(labels=config.labels, name="classifier", bias=True, dense=dense)


FEATURES = (
    *("bidirectional attention", "window", "local RoPE", "exact GELU", "biases", "layer norms"),
    "norm of the embedding",
)
MODERNBERT = ModelFamily("modernbert", declare, FEATURES)
MODERNBERT_CLASSIFIER = replace(
    MODERNBERT,
    features=(
        *FEATURES,
        *("dense layer", "activation of the dense layer", "norm of the dense layer"),
        *("first token", "mean of tokens", "biased head"),
    ),
)
