"""Maps architectures to families.

Code in a model folder is never run, but named in the error where a model would need it.
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_worker.model.errors import UnknownArchitecture
from antiphon.model_worker.model.families.bert import BERT, MODERNBERT, ROBERTA
from antiphon.model_worker.model.families.clip import CLIP, SIGLIP
from antiphon.model_worker.model.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    GLM4V_MOE,
)
from antiphon.model_worker.model.families.eagle3 import EAGLE3
from antiphon.model_worker.model.families.falcon_h1 import FALCON_H1
from antiphon.model_worker.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4
from antiphon.model_worker.model.families.gemma3n import GEMMA3N
from antiphon.model_worker.model.families.gpt import (
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    PHI,
    STARCODER2,
    WHISPER,
)
from antiphon.model_worker.model.families.llama import (
    GLM4,
    GLM4V,
    GRANITE,
    IDEFICS3,
    LLAMA,
    LLAMA4,
    LLAVA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    PADDLEOCR_VL,
    PHI3,
    SMOLLM3,
)
from antiphon.model_worker.model.families.multimodal import INTERNVL, LLAVA_NEXT
from antiphon.model_worker.model.families.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN2_VL,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_VL,
    QWEN3_5_VL_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from antiphon.model_worker.model.llama_parts import classifier, embedding_model, reward_model

if TYPE_CHECKING:
    from antiphon.model_card.files import ModelFiles
    from antiphon.model_worker.model.spec import ModelFamily

log = logging.getLogger(__name__)

FAMILIES: dict[str, ModelFamily] = {
    "FalconH1ForCausalLM": FALCON_H1,
    "LlamaForCausalLM": LLAMA,
    "Llama4ForCausalLM": LLAMA4,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2AudioForConditionalGeneration": QWEN2,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_VL,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
    "MistralForCausalLM": MISTRAL,
    "SmolLM3ForCausalLM": SMOLLM3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Idefics3ForConditionalGeneration": IDEFICS3,
    "InternVLForConditionalGeneration": INTERNVL,
    "Kimi_K25ForConditionalGeneration": DEEPSEEK_V3,
    "Llama4ForConditionalGeneration": LLAMA4,
    "LlavaForConditionalGeneration": LLAVA,
    "LlavaNextForConditionalGeneration": LLAVA_NEXT,
    "LlavaOnevisionForConditionalGeneration": LLAVA_NEXT,
    "MiniCPMV4_6ForConditionalGeneration": QWEN3_5,
    "Mistral3ForConditionalGeneration": MISTRAL,
    "PaddleOCRVLForConditionalGeneration": PADDLEOCR_VL,
    "SmolVLMForConditionalGeneration": IDEFICS3,
    "PhiForCausalLM": PHI,
    "Phi3ForCausalLM": PHI3,
    "Phi4MultimodalForCausalLM": PHI3,
    "Glm4ForCausalLM": GLM4,
    "Olmo2ForCausalLM": OLMO2,
    "GraniteForCausalLM": GRANITE,
    "Starcoder2ForCausalLM": STARCODER2,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "GPT2LMHeadModel": GPT2,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5ForConditionalGeneration": QWEN3_5_VL,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_VL_MOE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4vForConditionalGeneration": GLM4V,
    "Glm4vMoeForConditionalGeneration": GLM4V_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "WhisperForConditionalGeneration": WHISPER,
    "GemmaForSequenceClassification": classifier(GEMMA),
    "Gemma2ForSequenceClassification": classifier(GEMMA2),
    "Gemma3TextForSequenceClassification": classifier(GEMMA3),
    "LlamaForSequenceClassification": classifier(LLAMA),
    "MistralForSequenceClassification": classifier(MISTRAL),
    "Qwen2ForSequenceClassification": classifier(QWEN2),
    "Qwen3ForSequenceClassification": classifier(QWEN3),
    "Qwen2ForRewardModel": reward_model(QWEN2),
    "Qwen3ForRewardModel": reward_model(QWEN3),
    "BertModel": BERT,
    "BertForSequenceClassification": BERT,
    "RobertaModel": ROBERTA,
    "RobertaForSequenceClassification": ROBERTA,
    "XLMRobertaModel": ROBERTA,
    "XLMRobertaForSequenceClassification": ROBERTA,
    "ModernBertModel": MODERNBERT,
    "ModernBertForSequenceClassification": MODERNBERT,
    "CLIPModel": CLIP,
    "SiglipModel": SIGLIP,
    "Gemma2Model": embedding_model(GEMMA2),
    "Gemma3TextModel": embedding_model(GEMMA3),
    "LlamaModel": embedding_model(LLAMA),
    "MistralModel": embedding_model(MISTRAL),
    "Qwen2Model": embedding_model(QWEN2),
    "Qwen3Model": embedding_model(QWEN3),
}

DRAFT_HEADS: dict[str, ModelFamily] = {"LlamaForCausalLMEagle3": EAGLE3}
"""Those that only draft for another model."""

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
        name = BASES.get(architecture, architecture)
        if family := FAMILIES.get(name) or DRAFT_HEADS.get(name):
            return family
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
    targets = chain.from_iterable([each] if isinstance(each, str) else each for each in mapped)
    return tuple(dict.fromkeys(_shown(target) for target in targets if target is not None))


def _shown(target: str) -> str:
    """`repository--module.Class`, where the code is in another repository."""
    repository, _, local = target.rpartition("--")
    module, _, name = local.rpartition(".")
    return f"{repository}/{module}.py:{name}" if repository else f"{module}.py:{name}"
