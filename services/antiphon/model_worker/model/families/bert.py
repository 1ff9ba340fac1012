"""BERT and (XLM-)RoBERTa: bidirectional attention, and post-norms after each block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.attention import AttentionNames
from antiphon.layers.classification_head import ClassificationHeadSpec, DenseSpec
from antiphon.layers.mlp import PlainMlpSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_card.tasks import Task, task_of
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import attention, model
from antiphon.model_worker.model.spec import EmbeddingSpec, LayerSpec, ModelFamily, Norms

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

NAMES = AttentionNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    out="attention.output.dense",
)
NORMS = Norms(with_mixer="attention.output.LayerNorm", with_feed_forward="output.LayerNorm")
FEATURES = (
    *("bidirectional attention", "biases", "post-norms", "norm of the embedding"),
    *("learned positions", "token types", "layer norms", "exact GELU"),
)
HEAD = ("dense layer", "activation of the dense layer", "first token", "biased head")


class _BertFields(msgspec.Struct, frozen=True):
    type_vocab_size: int = 2
    pad_token_id: int = 1
    position_embedding_type: str = "absolute"
    is_decoder: bool = False


def declare_bert(config: ConfigFile) -> ModelSpec:
    """Labels are scored from the first token, after the pooler."""
    pooler = DenseSpec(name="bert.pooler.dense", activation="tanh")
    head = ClassificationHeadSpec(labels=config.labels, name="classifier", bias=True, dense=pooler)
    return _encoder("bert", config, head, positions_first=0)


def declare_roberta(config: ConfigFile) -> ModelSpec:
    """Its head has its own dense layer; positions start after that of padding."""
    dense = DenseSpec(name="classifier.dense", activation="tanh")
    head = ClassificationHeadSpec(
        labels=config.labels, name="classifier.out_proj", bias=True, dense=dense
    )
    return _encoder(
        "roberta", config, head, positions_first=config.family_fields(_BertFields).pad_token_id + 1
    )


def _encoder(
    family: str, config: ConfigFile, head: ClassificationHeadSpec, *, positions_first: int
) -> ModelSpec:
    """Equal layers, whose names have the family's prefix."""
    fields = config.family_fields(_BertFields)
    if fields.position_embedding_type != "absolute" or fields.is_decoder:
        raise ModelLoadError(
            "config.json: position_embedding_type must be absolute, and is_decoder false"
        )
    norm = NormSpec(kind="layer", eps=config.layer_norm_eps, bias=True)
    layer = LayerSpec(
        mixer=replace(
            attention(config),
            causal=False,
            rotary=None,
            qkv_bias=True,
            out_bias=True,
            names=NAMES,
        ),
        feed_forward=PlainMlpSpec(
            width=config.width,
            activation=config.activation,
            bias=True,
            up="intermediate.dense",
            down="output.dense",
        ),
        norm=norm,
        norms=NORMS,
    )
    architecture = config.architectures[0]
    return msgspec.structs.replace(
        model(family, config, (layer,) * config.num_hidden_layers, norm),
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
        head=head if task_of(architecture) is Task.SCORE else None,
        pooling="cls",
        layer_name=f"{family}.encoder.layer.{{}}",
        ignored=("embeddings.position_ids",),
        prefix=f"{family}.",
        # The names that TensorFlow used, which the first checkpoints have.
        old_endings=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )


BERT = ModelFamily(name="bert", declare=declare_bert, features=FEATURES)
BERT_CLASSIFIER = replace(BERT, features=(*FEATURES, *HEAD))
ROBERTA = ModelFamily(
    name="roberta", declare=declare_roberta, features=(*FEATURES, "positions after padding")
)
ROBERTA_CLASSIFIER = replace(ROBERTA, features=(*ROBERTA.features, *HEAD))
