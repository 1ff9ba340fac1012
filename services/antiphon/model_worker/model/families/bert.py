"""BERT, (XLM-)RoBERTa and ModernBERT: bidirectional encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from antiphon.kernels.rotary import RotarySpec
from antiphon.layers.attention import AttentionNames, AttentionSpec
from antiphon.layers.classification_head import ClassificationHeadSpec, DenseSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_card.config_json import Task, task_of
from antiphon.model_worker.model.config_file import ConfigFile, activation_of
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import (
    attention,
    gated,
    layer_norm,
    layers,
    model,
    plain,
)
from antiphon.model_worker.model.spec import EmbeddingSpec, LayerSpec, ModelFamily, ModelSpec, Norms

BERT_NAMES = AttentionNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    out="attention.output.dense",
)
BERT_NORMS = Norms(with_mixer="attention.output.LayerNorm", with_feed_forward="output.LayerNorm")
MODERN_QKV = "attn.Wqkv"
MODERN_NAMES = AttentionNames(query=MODERN_QKV, key=MODERN_QKV, value=MODERN_QKV, out="attn.Wo")
MODERN_FIRST = Norms(before_feed_forward="mlp_norm")
"""The norm of the embedding directly precedes the first layer, which has no own norm there."""
MODERN_LATER = Norms(before_mixer="attn_norm", before_feed_forward="mlp_norm")


class _BertFields(msgspec.Struct, frozen=True):
    type_vocab_size: int = 2
    pad_token_id: int = 1
    position_embedding_type: str = "absolute"
    is_decoder: bool = False


def declare_bert(config: ConfigFile) -> ModelSpec:
    """BERT: bidirectional attention, and post-norms after each block."""
    return _encoder("bert", config, "classifier", "bert.pooler.dense", positions_first=0)


def declare_roberta(config: ConfigFile) -> ModelSpec:
    """(XLM-)RoBERTa: bidirectional attention, and post-norms after each block."""
    positions_first = config.family_fields(_BertFields).pad_token_id + 1
    head, dense = "classifier.out_proj", "classifier.dense"
    return _encoder("roberta", config, head, dense, positions_first=positions_first)


def _encoder(
    family: str, config: ConfigFile, head: str, dense: str, *, positions_first: int
) -> ModelSpec:
    """Equal layers, whose names have the family's prefix."""
    fields = config.family_fields(_BertFields)
    if fields.position_embedding_type != "absolute" or fields.is_decoder:
        raise ModelLoadError(
            "config.json: position_embedding_type must be absolute, and is_decoder false"
        )
    norm = layer_norm(config)
    layer = LayerSpec(
        mixer=attention(config, bias=True, causal=False, rotary=None, names=BERT_NAMES),
        feed_forward=plain(config, up="intermediate.dense", down="output.dense"),
        norm=norm,
        norms=BERT_NORMS,
    )
    scores = task_of(config.architectures[0]) is Task.SCORE
    return model(
        config,
        layer,
        context_tokens=config.max_position_embeddings - positions_first,
        norm_name=None,
        embedding=EmbeddingSpec(
            name=f"{family}.embeddings.word_embeddings",
            positions=f"{family}.embeddings.position_embeddings",
            positions_first=positions_first,
            types=f"{family}.embeddings.token_type_embeddings",
            types_count=fields.type_vocab_size,
            norm=norm,
            norm_name=f"{family}.embeddings.LayerNorm",
        ),
        head=_head(config, head, DenseSpec(name=dense, activation="tanh")) if scores else None,
        pooling="cls",
        layer_name=f"{family}.encoder.layer.{{}}",
        ignored=("embeddings.position_ids",),
        prefix=f"{family}.",
        # The names that TensorFlow used, which the first checkpoints have.
        old_endings=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )


class _ModernBertFields(msgspec.Struct, frozen=True):
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    norm_bias: bool = False
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"


def declare_modernbert(config: ConfigFile) -> ModelSpec:
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
            norms=MODERN_FIRST if first else MODERN_LATER,
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
        head=_head(config, "classifier", _modern_dense(fields, norm)) if scores else None,
        pooling=fields.classifier_pooling if scores else "cls",
        prefix="model.",
    )


def _mixer(config: ConfigFile, fields: _ModernBertFields, window: int | None) -> AttentionSpec:
    bias = config.attention_bias
    mixer = attention(config, window=window, bias=bias, causal=False, names=MODERN_NAMES)
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


def _modern_dense(fields: _ModernBertFields, norm: NormSpec) -> DenseSpec:
    return DenseSpec(
        name="head.dense",
        activation=activation_of(fields.classifier_activation, "classifier_activation"),
        bias=fields.classifier_bias,
        norm=norm,
        norm_name="head.norm",
    )


def _head(config: ConfigFile, name: str, dense: DenseSpec) -> ClassificationHeadSpec:
    return ClassificationHeadSpec(labels=config.labels, name=name, bias=True, dense=dense)


BERT = ModelFamily("bert", declare_bert)
ROBERTA = ModelFamily("roberta", declare_roberta)
MODERNBERT = ModelFamily("modernbert", declare_modernbert)
