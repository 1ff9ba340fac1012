"""Maps architectures to families; a family is imported when a model needs it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from antiphon.model_worker.model.spec import ModelFamily

FAMILIES: dict[str, str] = {
    "FalconH1ForCausalLM": "antiphon.model_worker.model.families.falcon_h1:FALCON_H1",
    "LlamaForCausalLM": "antiphon.model_worker.model.families.llama:LLAMA",
    "Llama4ForCausalLM": "antiphon.model_worker.model.families.llama4:LLAMA4",
    "Qwen2ForCausalLM": "antiphon.model_worker.model.families.qwen2:QWEN2",
    "Qwen3ForCausalLM": "antiphon.model_worker.model.families.qwen3:QWEN3",
    "MistralForCausalLM": "antiphon.model_worker.model.families.mistral:MISTRAL",
    "SmolLM3ForCausalLM": "antiphon.model_worker.model.families.smollm3:SMOLLM3",
    "GemmaForCausalLM": "antiphon.model_worker.model.families.gemma:GEMMA",
    "Gemma2ForCausalLM": "antiphon.model_worker.model.families.gemma2:GEMMA2",
    "Gemma3ForCausalLM": "antiphon.model_worker.model.families.gemma3:GEMMA3",
    "Gemma3ForConditionalGeneration": "antiphon.model_worker.model.families.gemma3:GEMMA3",
    "Llama4ForConditionalGeneration": "antiphon.model_worker.model.families.llama4:LLAMA4",
    "Mistral3ForConditionalGeneration": "antiphon.model_worker.model.families.mistral:MISTRAL",
    "PhiForCausalLM": "antiphon.model_worker.model.families.phi:PHI",
    "Phi3ForCausalLM": "antiphon.model_worker.model.families.phi3:PHI3",
    "Glm4ForCausalLM": "antiphon.model_worker.model.families.glm4:GLM4",
    "Olmo2ForCausalLM": "antiphon.model_worker.model.families.olmo2:OLMO2",
    "GraniteForCausalLM": "antiphon.model_worker.model.families.granite:GRANITE",
    "Starcoder2ForCausalLM": "antiphon.model_worker.model.families.starcoder2:STARCODER2",
    "GPTNeoXForCausalLM": "antiphon.model_worker.model.families.gpt_neox:GPT_NEOX",
    "GPT2LMHeadModel": "antiphon.model_worker.model.families.gpt2:GPT2",
    "Qwen3NextForCausalLM": "antiphon.model_worker.model.families.qwen3_next:QWEN3_NEXT",
    "DeepseekV2ForCausalLM": "antiphon.model_worker.model.families.deepseek:DEEPSEEK_V2",
    "DeepseekV3ForCausalLM": "antiphon.model_worker.model.families.deepseek:DEEPSEEK_V3",
    "Glm4MoeForCausalLM": "antiphon.model_worker.model.families.glm4_moe:GLM4_MOE",
    "GptOssForCausalLM": "antiphon.model_worker.model.families.gpt_oss:GPT_OSS",
    "MixtralForCausalLM": "antiphon.model_worker.model.families.mixtral:MIXTRAL",
    "Qwen2MoeForCausalLM": "antiphon.model_worker.model.families.qwen2_moe:QWEN2_MOE",
    "Qwen3MoeForCausalLM": "antiphon.model_worker.model.families.qwen3_moe:QWEN3_MOE",
    "GemmaForSequenceClassification": "antiphon.model_worker.model.families.classifiers:GEMMA",
    "Gemma2ForSequenceClassification": "antiphon.model_worker.model.families.classifiers:GEMMA2",
    "Gemma3TextForSequenceClassification": (
        "antiphon.model_worker.model.families.classifiers:GEMMA3"
    ),
    "LlamaForSequenceClassification": "antiphon.model_worker.model.families.classifiers:LLAMA",
    "MistralForSequenceClassification": "antiphon.model_worker.model.families.classifiers:MISTRAL",
    "Qwen2ForSequenceClassification": "antiphon.model_worker.model.families.classifiers:QWEN2",
    "Qwen3ForSequenceClassification": "antiphon.model_worker.model.families.classifiers:QWEN3",
    "Qwen2ForRewardModel": "antiphon.model_worker.model.families.classifiers:QWEN2_REWARD",
    "Qwen3ForRewardModel": "antiphon.model_worker.model.families.classifiers:QWEN3_REWARD",
    "BertModel": "antiphon.model_worker.model.families.bert:BERT",
    "BertForSequenceClassification": "antiphon.model_worker.model.families.bert:BERT_CLASSIFIER",
    "RobertaModel": "antiphon.model_worker.model.families.bert:ROBERTA",
    "RobertaForSequenceClassification": (
        "antiphon.model_worker.model.families.bert:ROBERTA_CLASSIFIER"
    ),
    "XLMRobertaModel": "antiphon.model_worker.model.families.bert:ROBERTA",
    "XLMRobertaForSequenceClassification": (
        "antiphon.model_worker.model.families.bert:ROBERTA_CLASSIFIER"
    ),
    "ModernBertModel": "antiphon.model_worker.model.families.modernbert:MODERNBERT",
    "ModernBertForSequenceClassification": (
        "antiphon.model_worker.model.families.modernbert:MODERNBERT_CLASSIFIER"
    ),
    "Gemma2Model": "antiphon.model_worker.model.families.classifiers:GEMMA2_BASE",
    "Gemma3TextModel": "antiphon.model_worker.model.families.classifiers:GEMMA3_BASE",
    "LlamaModel": "antiphon.model_worker.model.families.classifiers:LLAMA_BASE",
    "MistralModel": "antiphon.model_worker.model.families.classifiers:MISTRAL_BASE",
    "Qwen2Model": "antiphon.model_worker.model.families.classifiers:QWEN2_BASE",
    "Qwen3Model": "antiphon.model_worker.model.families.classifiers:QWEN3_BASE",
}


BASES: dict[str, str] = {
    "BertForMaskedLM": "BertModel",
    "ModernBertForMaskedLM": "ModernBertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForMaskedLM": "XLMRobertaModel",
}
"""Architectures served without their head, as embedding models."""


def find_family(architectures: tuple[str, ...]) -> ModelFamily:
    """The family of the first supported architecture.

    Raises:
        ModelLoadError: None is supported; lists those that are.
    """
    for architecture in architectures:
        if target := FAMILIES.get(BASES.get(architecture, architecture)):
            module, _, name = target.partition(":")
            return cast("ModelFamily", getattr(importlib.import_module(module), name))
    named = ", ".join(architectures) or "none"
    raise ModelLoadError(
        f"config.json: architecture {named} is not supported: there are {', '.join(FAMILIES)}"
    )
