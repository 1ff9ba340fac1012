"""Rows of the families that draw no tokens: encoders, classifiers, rewards; see `families`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.models import mutants as no
from tests.models import mutants_judges as no_judge
from tests.models.families import LAYERS, SIZES, VOCABULARY, WINDOWS_IN_TURN, Row
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model, Qwen2PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, Qwen3PreTrainedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.models.mutants import Mutant
    from torch import Tensor

LABELS = {"id2label": {str(index): f"label {index}" for index in range(5)}}
ENCODER_SIZES: Mapping[str, object] = {
    name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "pad_token_id")
}
PADDING = VOCABULARY + 2
"""An id that no text has: a token of padding has another position in transformers."""
PADDED: Mapping[str, object] = {"vocab_size": VOCABULARY + 3, "pad_token_id": PADDING}
CLASSIFIER: Mapping[str, Mutant] = {"last token": no_judge.last_token}
ENCODER: Mapping[str, Mutant] = {
    "bidirectional attention": no_judge.both_ways,
    "norm of the embedding": no_judge.norm_of_embedding,
}
BERT: Mapping[str, Mutant] = {
    **ENCODER,
    "biases": no.biases,
    "post-norms": no_judge.norms_of_stream,
    "learned positions": no.learned_positions,
    "token types": no_judge.types_of_tokens,
}
ROBERTA: Mapping[str, Mutant] = {
    **BERT,
    "positions after padding": no_judge.positions_after_padding,
}
HEAD: Mapping[str, Mutant] = {
    "dense layer": no_judge.dense_layer,
    "first token": no_judge.first_token,
}
IDLE = ("self.key.bias",)
"""What is added to all keys adds the same to all scores of a query, if keys are not rotated."""
MODERN: Mapping[str, object] = {
    "num_hidden_layers": LAYERS,
    "layer_types": WINDOWS_IN_TURN,
    "local_attention": 20,
    "attention_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
MODERN_MUTANTS: Mapping[str, Mutant] = {
    **ENCODER,
    "window": no.windows,
    "local RoPE": no.local_rotation,
    "exact GELU": no_judge.gelu,
    "biases": no.biases,
    "layer norms": no.layer_norms,
}


class _Reward:
    """Two linears over the last token, as the reward models of Qwen have them."""

    model: Any
    score: torch.nn.Module

    def _score(self, hidden: int) -> torch.nn.Module:
        linear = torch.nn.Linear
        return torch.nn.Sequential(linear(hidden, hidden), torch.nn.ReLU(), linear(hidden, 1))

    def forward(self, input_ids: Tensor) -> Any:
        stream = self.model(input_ids).last_hidden_state
        return SequenceClassifierOutput(logits=self.score(stream)[:, -1])


class Qwen2ForRewardModel(_Reward, Qwen2PreTrainedModel):
    def __init__(self, config: transformers.Qwen2Config) -> None:
        Qwen2PreTrainedModel.__init__(self, config)
        self.model = Qwen2Model(config)
        self.score = self._score(config.hidden_size)
        self.post_init()


class Qwen3ForRewardModel(_Reward, Qwen3PreTrainedModel):
    def __init__(self, config: transformers.Qwen3Config) -> None:
        Qwen3PreTrainedModel.__init__(self, config)
        self.model = Qwen3Model(config)
        self.score = self._score(config.hidden_size)
        self.post_init()


def classifier(
    architecture: type[transformers.PreTrainedModel],
    config: type[transformers.PreTrainedConfig],
    **fields: object,
) -> Row:
    """A decoder whose last token is scored."""
    return Row(
        name=architecture.__name__,
        architecture=architecture,
        config=config,
        fields={**LABELS, **fields},
        mutants=CLASSIFIER,
    )


def base(
    architecture: type[transformers.PreTrainedModel],
    config: type[transformers.PreTrainedConfig],
    **fields: object,
) -> Row:
    """A decoder without a head."""
    return Row(name=architecture.__name__, architecture=architecture, config=config, fields=fields)


ROWS = (
    classifier(
        transformers.LlamaForSequenceClassification, transformers.LlamaConfig, attention_bias=True
    ),
    classifier(
        transformers.MistralForSequenceClassification,
        transformers.MistralConfig,
        sliding_window=20,
    ),
    classifier(transformers.Qwen2ForSequenceClassification, transformers.Qwen2Config),
    classifier(transformers.Qwen3ForSequenceClassification, transformers.Qwen3Config, head_dim=32),
    classifier(transformers.GemmaForSequenceClassification, transformers.GemmaConfig, head_dim=32),
    classifier(
        transformers.Gemma2ForSequenceClassification,
        transformers.Gemma2Config,
        head_dim=32,
        sliding_window=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    classifier(
        transformers.Gemma3TextForSequenceClassification,
        transformers.Gemma3TextConfig,
        head_dim=32,
        sliding_window=20,
        layer_types=WINDOWS_IN_TURN,
    ),
    Row(
        name="Qwen2ForRewardModel",
        architecture=Qwen2ForRewardModel,
        config=transformers.Qwen2Config,
        mutants={**CLASSIFIER, "dense layer": no_judge.dense_layer},
    ),
    Row(
        name="Qwen3ForRewardModel",
        architecture=Qwen3ForRewardModel,
        config=transformers.Qwen3Config,
        fields={"head_dim": 32},
        mutants={**CLASSIFIER, "dense layer": no_judge.dense_layer},
    ),
    base(
        transformers.Gemma2Model,
        transformers.Gemma2Config,
        head_dim=32,
        sliding_window=20,
        attn_logit_softcapping=2.0,
    ),
    base(
        transformers.Gemma3TextModel,
        transformers.Gemma3TextConfig,
        head_dim=32,
        sliding_window=20,
        layer_types=WINDOWS_IN_TURN,
    ),
    Row(
        name="Gemma3TextModel that sees both ways",
        architecture=transformers.Gemma3TextModel,
        config=transformers.Gemma3TextConfig,
        fields={
            "head_dim": 32,
            "sliding_window": 20,
            "layer_types": WINDOWS_IN_TURN,
            "use_bidirectional_attention": True,
        },
        mutants={"bidirectional attention": no_judge.both_ways},
    ),
    base(transformers.LlamaModel, transformers.LlamaConfig),
    base(transformers.MistralModel, transformers.MistralConfig, sliding_window=20),
    base(transformers.Qwen2Model, transformers.Qwen2Config),
    base(transformers.Qwen3Model, transformers.Qwen3Config),
    Row(
        name="BertModel",
        architecture=transformers.BertModel,
        config=transformers.BertConfig,
        sizes=ENCODER_SIZES,
        fields={"type_vocab_size": 3, "pad_token_id": 0},
        mutants=BERT,
        types=3,
        idle=IDLE,
    ),
    Row(
        name="BertForSequenceClassification",
        architecture=transformers.BertForSequenceClassification,
        config=transformers.BertConfig,
        sizes=ENCODER_SIZES,
        fields={**LABELS, "pad_token_id": 0},
        mutants={**BERT, **HEAD},
        types=2,
        idle=IDLE,
    ),
    Row(
        name="RobertaModel",
        architecture=transformers.RobertaModel,
        config=transformers.RobertaConfig,
        sizes=ENCODER_SIZES,
        fields=PADDED,
        mutants=ROBERTA,
        types=2,
        idle=IDLE,
    ),
    Row(
        name="RobertaForSequenceClassification",
        architecture=transformers.RobertaForSequenceClassification,
        config=transformers.RobertaConfig,
        sizes=ENCODER_SIZES,
        fields={**LABELS, **PADDED},
        mutants={**ROBERTA, **HEAD},
        types=2,
        idle=IDLE,
    ),
    Row(
        name="XLMRobertaModel",
        architecture=transformers.XLMRobertaModel,
        config=transformers.XLMRobertaConfig,
        sizes=ENCODER_SIZES,
        fields=PADDED,
        mutants=ROBERTA,
        types=2,
        idle=IDLE,
    ),
    Row(
        name="XLMRobertaForSequenceClassification",
        architecture=transformers.XLMRobertaForSequenceClassification,
        config=transformers.XLMRobertaConfig,
        sizes=ENCODER_SIZES,
        fields={**LABELS, **PADDED},
        mutants={**ROBERTA, **HEAD},
        types=2,
        idle=IDLE,
    ),
    Row(
        name="ModernBertModel",
        architecture=transformers.ModernBertModel,
        config=transformers.ModernBertConfig,
        sizes=ENCODER_SIZES,
        fields=MODERN,
        mutants=MODERN_MUTANTS,
    ),
    Row(
        name="ModernBertForSequenceClassification by its first token",
        architecture=transformers.ModernBertForSequenceClassification,
        config=transformers.ModernBertConfig,
        sizes=ENCODER_SIZES,
        fields={**LABELS, **MODERN, "classifier_bias": True},
        mutants={
            **MODERN_MUTANTS,
            "dense layer": no_judge.dense_layer,
            "norm of the dense layer": no_judge.norm_of_dense,
            "first token": no_judge.pooling,
        },
    ),
    Row(
        name="ModernBertForSequenceClassification by the mean of its tokens",
        architecture=transformers.ModernBertForSequenceClassification,
        config=transformers.ModernBertConfig,
        sizes=ENCODER_SIZES,
        fields={
            **LABELS,
            "pad_token_id": 0,
            "local_attention": 20,
            "classifier_pooling": "mean",
        },
        mutants={"mean of tokens": no_judge.pooling},
    ),
)
