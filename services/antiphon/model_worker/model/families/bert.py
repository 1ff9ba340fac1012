"""BERT and (XLM-)RoBERTa."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.attention import AttentionNames
from antiphon.layers.classification_head import ClassificationHeadSpec, DenseSpec
from antiphon.model_card.tasks import Task, task_of
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import attention, layer_norm, model, plain
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
        mixer=attention(config, bias=True, causal=False, rotary=None, names=NAMES),
        feed_forward=plain(config, up="intermediate.dense", down="output.dense"),
        norm=norm,
        norms=NORMS,
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
        head=_head(config, head, dense) if scores else None,
        pooling="cls",
        layer_name=f"{family}.encoder.layer.{{}}",
        ignored=("embeddings.position_ids",),
        prefix=f"{family}.",
        # The names that TensorFlow used, which the first checkpoints have.
        old_endings=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )


def _head(config: ConfigFile, name: str, dense: str) -> ClassificationHeadSpec:
    layer = DenseSpec(name=dense, activation="tanh")
    return ClassificationHeadSpec(labels=config.labels, name=name, bias=True, dense=layer)


BERT = ModelFamily("bert", declare_bert, FEATURES)
BERT_CLASSIFIER = replace(BERT, features=(*FEATURES, *HEAD))
ROBERTA = ModelFamily("roberta", declare_roberta, (*FEATURES, "positions after padding"))
ROBERTA_CLASSIFIER = replace(ROBERTA, features=(*ROBERTA.features, *HEAD))
