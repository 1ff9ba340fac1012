"""Rows of the families that draw no tokens: encoders, classifiers, rewards; see `families`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.models.families import LAYERS, SIZES, VOCABULARY, WINDOWS_IN_TURN, Row
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model, Qwen2PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, Qwen3PreTrainedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LABELS = {"id2label": {str(index): f"label {index}" for index in range(5)}}
ENCODER_SIZES: Mapping[str, object] = {
    name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "pad_token_id")
}
PADDING = VOCABULARY + 2
"""An id that no text has: a token of padding has another position in transformers."""
PADDED: Mapping[str, object] = {"vocab_size": VOCABULARY + 3, "pad_token_id": PADDING}
GEMMA3: Mapping[str, object] = {
    "head_dim": 32,
    "sliding_window": 20,
    "layer_types": WINDOWS_IN_TURN,
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


def classifier(architecture: type[transformers.PreTrainedModel], **fields: object) -> Row:
    """A decoder whose last token is scored."""
    return base(architecture, **LABELS, **fields)


def base(architecture: type[transformers.PreTrainedModel], **fields: object) -> Row:
    """A decoder without a head."""
    return Row(architecture.__name__, architecture, fields)


def encoder(
    architecture: type[transformers.PreTrainedModel], fields: Mapping[str, object], types: int = 2
) -> Row:
    """An encoder that distinguishes types of tokens."""
    row = base(architecture, **fields)
    return replace(row, sizes=ENCODER_SIZES, types=types, idle=IDLE)


ROWS = (
    classifier(transformers.LlamaForSequenceClassification, attention_bias=True),
    classifier(transformers.MistralForSequenceClassification, sliding_window=20),
    classifier(transformers.Qwen2ForSequenceClassification),
    classifier(transformers.Qwen3ForSequenceClassification, head_dim=32),
    classifier(transformers.GemmaForSequenceClassification, head_dim=32),
    classifier(
        transformers.Gemma2ForSequenceClassification,
        head_dim=32,
        sliding_window=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    classifier(transformers.Gemma3TextForSequenceClassification, **GEMMA3),
    Row("Qwen2ForRewardModel", Qwen2ForRewardModel),
    Row("Qwen3ForRewardModel", Qwen3ForRewardModel, {"head_dim": 32}),
    base(transformers.Gemma2Model, head_dim=32, sliding_window=20, attn_logit_softcapping=2.0),
    base(transformers.Gemma3TextModel, **GEMMA3),
    Row(
        "Gemma3TextModel that sees both ways",
        transformers.Gemma3TextModel,
        {**GEMMA3, "use_bidirectional_attention": True},
    ),
    base(transformers.LlamaModel),
    base(transformers.MistralModel, sliding_window=20),
    base(transformers.Qwen2Model),
    base(transformers.Qwen3Model),
    encoder(transformers.BertModel, {"type_vocab_size": 3, "pad_token_id": 0}, types=3),
    encoder(transformers.BertForSequenceClassification, {**LABELS, "pad_token_id": 0}),
    encoder(transformers.RobertaModel, PADDED),
    encoder(transformers.RobertaForSequenceClassification, {**LABELS, **PADDED}),
    encoder(transformers.XLMRobertaModel, PADDED),
    encoder(transformers.XLMRobertaForSequenceClassification, {**LABELS, **PADDED}),
    Row("ModernBertModel", transformers.ModernBertModel, MODERN, sizes=ENCODER_SIZES),
    Row(
        "ModernBertForSequenceClassification by its first token",
        transformers.ModernBertForSequenceClassification,
        {**LABELS, **MODERN, "classifier_bias": True},
        sizes=ENCODER_SIZES,
    ),
    Row(
        "ModernBertForSequenceClassification by the mean of its tokens",
        transformers.ModernBertForSequenceClassification,
        {**LABELS, "pad_token_id": 0, "local_attention": 20, "classifier_pooling": "mean"},
        sizes=ENCODER_SIZES,
    ),
)

TOWER: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}


def two_towers(
    architecture: type[transformers.PreTrainedModel], vision: int, **fields: object
) -> Row:
    """A tower for texts beside one for images, of this width, whose vectors are compared."""
    text = {**ENCODER_SIZES, "eos_token_id": VOCABULARY - 1}
    images = {**TOWER, "hidden_size": vision, "image_size": 32, "patch_size": 8}
    return replace(
        base(architecture, text_config=text, vision_config=images, **fields),
        sizes={},
        idle=("k_proj.bias",),
    )


TWO_TOWERS = (
    two_towers(transformers.CLIPModel, 48, projection_dim=40),
    two_towers(transformers.SiglipModel, 64),
)
"""`test_two_towers` compares them: their vectors are not those of their last layer."""
