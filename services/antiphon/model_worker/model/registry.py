"""Maps architectures to families; a family is imported when a model needs it.

Code in a model folder is never run, but named in the error where a model would need it.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_worker.model.errors import UnknownArchitecture

if TYPE_CHECKING:
    from antiphon.model_card.files import ModelFiles
    from antiphon.model_worker.model.spec import ModelFamily

log = logging.getLogger(__name__)

FAMILIES: dict[str, str] = {
    "FalconH1ForCausalLM": "antiphon.model_worker.model.families.falcon_h1:FALCON_H1",
    "LlamaForCausalLM": "antiphon.model_worker.model.families.llama:LLAMA",
    "Llama4ForCausalLM": "antiphon.model_worker.model.families.llama4:LLAMA4",
    "Qwen2ForCausalLM": "antiphon.model_worker.model.families.qwen:QWEN2",
    "Qwen3ForCausalLM": "antiphon.model_worker.model.families.qwen:QWEN3",
    "MistralForCausalLM": "antiphon.model_worker.model.families.mistral:MISTRAL",
    "SmolLM3ForCausalLM": "antiphon.model_worker.model.families.llama:SMOLLM3",
    "GemmaForCausalLM": "antiphon.model_worker.model.families.gemma:GEMMA",
    "Gemma2ForCausalLM": "antiphon.model_worker.model.families.gemma:GEMMA2",
    "Gemma3ForCausalLM": "antiphon.model_worker.model.families.gemma:GEMMA3",
    "Gemma3ForConditionalGeneration": "antiphon.model_worker.model.families.gemma:GEMMA3",
    "Llama4ForConditionalGeneration": "antiphon.model_worker.model.families.llama4:LLAMA4",
    "Mistral3ForConditionalGeneration": "antiphon.model_worker.model.families.mistral:MISTRAL",
    "PhiForCausalLM": "antiphon.model_worker.model.families.gpt:PHI",
    "Phi3ForCausalLM": "antiphon.model_worker.model.families.llama:PHI3",
    "Glm4ForCausalLM": "antiphon.model_worker.model.families.llama:GLM4",
    "Olmo2ForCausalLM": "antiphon.model_worker.model.families.llama:OLMO2",
    "GraniteForCausalLM": "antiphon.model_worker.model.families.llama:GRANITE",
    "Starcoder2ForCausalLM": "antiphon.model_worker.model.families.gpt:STARCODER2",
    "GPTNeoXForCausalLM": "antiphon.model_worker.model.families.gpt:GPT_NEOX",
    "GPT2LMHeadModel": "antiphon.model_worker.model.families.gpt:GPT2",
    "Qwen3NextForCausalLM": "antiphon.model_worker.model.families.qwen:QWEN3_NEXT",
    "DeepseekV2ForCausalLM": "antiphon.model_worker.model.families.deepseek:DEEPSEEK_V2",
    "DeepseekV3ForCausalLM": "antiphon.model_worker.model.families.deepseek:DEEPSEEK_V3",
    "Glm4MoeForCausalLM": "antiphon.model_worker.model.families.deepseek:GLM4_MOE",
    "GptOssForCausalLM": "antiphon.model_worker.model.families.gpt_oss:GPT_OSS",
    "MixtralForCausalLM": "antiphon.model_worker.model.families.mistral:MIXTRAL",
    "Qwen2MoeForCausalLM": "antiphon.model_worker.model.families.qwen:QWEN2_MOE",
    "Qwen3MoeForCausalLM": "antiphon.model_worker.model.families.qwen:QWEN3_MOE",
    "GemmaForSequenceClassification": "antiphon.model_worker.model.families.gemma:GEMMA_CLASSIFIER",
    "Gemma2ForSequenceClassification": (
        "antiphon.model_worker.model.families.gemma:GEMMA2_CLASSIFIER"
    ),
    "Gemma3TextForSequenceClassification": (
        "antiphon.model_worker.model.families.gemma:GEMMA3_CLASSIFIER"
    ),
    "LlamaForSequenceClassification": "antiphon.model_worker.model.families.llama:LLAMA_CLASSIFIER",
    "MistralForSequenceClassification": (
        "antiphon.model_worker.model.families.mistral:MISTRAL_CLASSIFIER"
    ),
    "Qwen2ForSequenceClassification": "antiphon.model_worker.model.families.qwen:QWEN2_CLASSIFIER",
    "Qwen3ForSequenceClassification": "antiphon.model_worker.model.families.qwen:QWEN3_CLASSIFIER",
    "Qwen2ForRewardModel": "antiphon.model_worker.model.families.qwen:QWEN2_REWARD",
    "Qwen3ForRewardModel": "antiphon.model_worker.model.families.qwen:QWEN3_REWARD",
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
    "Gemma2Model": "antiphon.model_worker.model.families.gemma:GEMMA2_BASE",
    "Gemma3TextModel": "antiphon.model_worker.model.families.gemma:GEMMA3_BASE",
    "LlamaModel": "antiphon.model_worker.model.families.llama:LLAMA_BASE",
    "MistralModel": "antiphon.model_worker.model.families.mistral:MISTRAL_BASE",
    "Qwen2Model": "antiphon.model_worker.model.families.qwen:QWEN2_BASE",
    "Qwen3Model": "antiphon.model_worker.model.families.qwen:QWEN3_BASE",
}

BASES: dict[str, str] = {
    "BertForMaskedLM": "BertModel",
    "ModernBertForMaskedLM": "ModernBertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForMaskedLM": "XLMRobertaModel",
}
"""Architectures served without their head, as embedding models."""


def find_family(architectures: tuple[str, ...]) -> ModelFamily:
    """The family of the first supported architecture."""
    for architecture in architectures:
        if target := FAMILIES.get(BASES.get(architecture, architecture)):
            module, _, name = target.partition(":")
            return cast("ModelFamily", getattr(importlib.import_module(module), name))
    named = ", ".join(architectures) or "none"
    raise UnknownArchitecture(
        f"config.json: architecture {named} is not supported: there are {', '.join(FAMILIES)}"
    )


class _AutoMapConfig(msgspec.Struct):
    auto_map: dict[str, str | list[str | None]] = {}


def family_of(architectures: tuple[str, ...], files: ModelFiles) -> ModelFamily:
    """The family that serves a model with our own code, whatever code the folder contains."""
    code = _remote_code(files.config())
    try:
        family = find_family(architectures)
    except UnknownArchitecture as error:
        if not code:
            raise
        raise UnknownArchitecture(
            f"{error}; the folder's own code ({', '.join(code)}) is never run"
        ) from error
    if code:
        log.info("code of the model folder is not run", extra={"code": code})
    return family


def _remote_code(config: bytes) -> tuple[str, ...]:
    """The code that a config maps: `file.py:Class` of each class, in order."""
    try:
        mapped = msgspec.json.decode(config, type=_AutoMapConfig).auto_map.values()
    except msgspec.DecodeError as error:
        raise ConfigError(f"config.json: {error}") from error
    targets = [
        target
        for value in mapped
        for target in ([value] if isinstance(value, str) else value)
        if target is not None
    ]
    return tuple(dict.fromkeys(_shown(target) for target in targets))


def _shown(target: str) -> str:
    """`repository--module.Class`, where the code is in another repository."""
    repository, _, local = target.rpartition("--")
    module, _, name = local.rpartition(".")
    return f"{repository}/{module}.py:{name}" if repository else f"{module}.py:{name}"
