"""Completes config.json: the text model's fields, common names, the defaults of its family.

A file written by transformers omits the defaults of its model class, and old families have names of
their own. All readers of a config use the completed one, so that the plan and the decoder cannot
disagree. The name of the architecture decides the task.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


T = TypeVar("T")


def read_json(file: Path, type_: type[T]) -> T:
    try:
        return parse_json(file.read_bytes(), type_, file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def parse_json(content: bytes | str | msgspec.Raw, type_: type[T], source: object) -> T:
    """Decode JSON; the error begins with its source."""
    try:
        return msgspec.json.decode(content, type=type_)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: {error}") from error


Fields = dict[str, msgspec.Raw]
Factors = Literal["short", "long"]

MULTIMODAL_ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "Phi4MultimodalForCausalLM",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
"""Multimodal architectures whose text model is served."""
PUBLISHED_NAMES: Mapping[str, str] = {
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"
}
"""Names of multimodal architectures in published files, and in transformers."""
TWO_TOWER_ARCHITECTURES = ("CLIPModel", "SiglipModel")
"""Architectures with a tower for texts, which is served as an embedding model, and one for images,
whose vectors are compared with those of texts."""
TRANSCRIBING_ARCHITECTURES = ("WhisperForConditionalGeneration",)
"""Architectures that transcribe audio: a text model that attends to what an encoder has made."""
AUDIO_PROMPT_ARCHITECTURES = ("Qwen2AudioForConditionalGeneration",)
"""Multimodal architectures that take audio in prompts."""
TEXT_MODEL_PREFIXES = ("language_model.", "text_model.")
"""Prefixes of its tensor names, first or after the common prefix."""
VISION_PREFIXES = (
    *("vision_tower.", "vision_model.", "visual.", "audio_tower."),
    *("multi_modal_projector.", "connector.", "image_newline", "projector.", "mlp_AR."),
    *("embed_vision.", "embed_audio.", "mm_projector.", "merger.", "embed_tokens_extend."),
)
"""Prefixes of tensors of towers for media, and of what is behind them."""

FIELD_ALIASES: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "hidden_activation": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
    "norm_eps": "layer_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
    "kv_channels": "head_dim",
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "max_target_positions": "max_position_embeddings",
}
"""Names of fields in some families, and in most."""

_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}
_QWEN_VL = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
_QWEN3_5 = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_ERNIE = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_BERT = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
FAMILY_DEFAULTS: Mapping[str, Mapping[str, bool | float | str]] = {
    "bert": {**_BERT, "pad_token_id": 0},
    "clip_text_model": {"hidden_act": "quick_gelu"},
    "deepseek_v2": {"topk_method": "greedy"},
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": {
        **_GEMMA,
        "rope_theta": 1e6,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "gemma3n_text": {
        **_GEMMA,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "vocab_size": 262400,
        "sliding_window": 512,
        "rope_theta": 1e6,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_text": {
        **_GEMMA,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "vocab_size": 262144,
        "sliding_window": 512,
        "global_head_dim": 512,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "glm4": {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4v_text": {"rms_norm_eps": 1e-5, "num_key_value_heads": 2},
    "glm4v_moe_text": {"partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1e-5},
    "gpt2": {"tie_word_embeddings": True, "hidden_act": "gelu_new"},
    "gpt_neox": {"partial_rotary_factor": 0.25, "hidden_act": "gelu", "attention_bias": True},
    "llama4_text": {
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "n_shared_experts": 1,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    },
    "modernbert": {"hidden_act": "gelu"},
    "paddleocr_vl": _ERNIE,
    "paddleocr_vl_text": _ERNIE,
    "phi": {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen2_vl_text": _QWEN_VL,
    "qwen3": {"head_dim": 128},
    "qwen3_vl_text": {"head_dim": 128, "rope_theta": 5e5},
    "qwen3_vl_moe_text": {"rope_theta": 5e5, "num_experts": 60, "num_experts_per_tok": 4},
    "qwen3_5_text": {**_QWEN3_5, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {
        **_QWEN3_5,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "roberta": {**_BERT, "pad_token_id": 1},
    "siglip_text_model": {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2e6},
    "xlm-roberta": {**_BERT, "pad_token_id": 1},
    "whisper": {"tie_word_embeddings": True, "hidden_act": "gelu"},
    "starcoder2": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
}
"""By `model_type`: defaults of unset fields that differ from those of most families."""

_LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
}
_MISTRAL_7B = {
    **_LLAMA_7B,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_QWEN2 = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}
TEXT_DEFAULTS: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("CLIPModel", "clip_text_model"): {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "vocab_size": 49408,
        "eos_token_id": 49407,
    },
    ("InternVLForConditionalGeneration", "qwen2"): _QWEN2,
    ("LlavaNextForConditionalGeneration", "llama"): _LLAMA_7B,
    ("LlavaNextForConditionalGeneration", "mistral"): _MISTRAL_7B,
    ("LlavaNextForConditionalGeneration", "qwen2"): _QWEN2,
    ("LlavaOnevisionForConditionalGeneration", "qwen2"): _QWEN2,
    ("Idefics3ForConditionalGeneration", "llama"): _LLAMA_7B,
    ("LlavaForConditionalGeneration", "llama"): _LLAMA_7B,
    ("LlavaForConditionalGeneration", "mistral"): _MISTRAL_7B,
    ("Qwen2AudioForConditionalGeneration", "qwen2"): _QWEN2,
    ("SiglipModel", "siglip_text_model"): {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "vocab_size": 32000,
    },
    ("SmolVLMForConditionalGeneration", "llama"): _LLAMA_7B,
}
"""By architecture and the type of its text model: fields that published files leave out."""
TEXT_TYPES: Mapping[str, str] = {
    "CLIPModel": "clip_text_model",
    "InternVLForConditionalGeneration": "qwen2",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
    "Qwen2AudioForConditionalGeneration": "qwen2",
    "SiglipModel": "siglip_text_model",
}
"""By architecture: the type of a text model whose config does not say it."""
OUTER_FIELDS: Mapping[str, tuple[str, ...]] = {"CLIPModel": ("projection_dim",)}
"""By architecture: fields that text models have, too, and that the config of all decides."""
TIED = frozenset({"InternVLForConditionalGeneration", "Kimi_K25ForConditionalGeneration"})
"""Architectures whose head is the embedding table, if neither config says whether it is."""
TIED_AS_TEXT = frozenset({"LlavaOnevisionForConditionalGeneration"})
"""Architectures whose head is the embedding table if either config says so."""

_ONE_HEAD_COUNT = ("num_key_value_heads", "head_dim")
IGNORED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "bert": _ONE_HEAD_COUNT,
    "gpt2": (*_ONE_HEAD_COUNT, "intermediate_size"),
    "gpt_neox": ("num_key_value_heads",),
    "modernbert": ("num_key_value_heads",),
    "roberta": _ONE_HEAD_COUNT,
    "whisper": (*_ONE_HEAD_COUNT, "num_hidden_layers", "num_attention_heads"),  # the encoder's
    "xlm-roberta": _ONE_HEAD_COUNT,
}
"""By `model_type`: fields that transformers ignores for a family, although tools write them."""

_TWO_TOWERS = frozenset({"clip_text_model", "siglip_text_model"})
UNGATED_MLP = _TWO_TOWERS | {
    *("bert", "gpt2", "gpt_neox", "phi", "roberta", "starcoder2", "whisper", "xlm-roberta")
}
"""Families whose feed-forward blocks have two linear layers, not three."""
LEARNED_POSITIONS = _TWO_TOWERS | {"bert", "gpt2", "roberta", "whisper", "xlm-roberta"}
"""Families with learned position embeddings."""
CROSS_ATTENTION = frozenset({"whisper"})
"""Families whose layers attend to another sequence, too."""
PADDED_POSITIONS = frozenset({"roberta", "xlm-roberta"})
"""Families whose positions start after the padding position, which is the padding token's id."""
REPEATED_KV = frozenset({"jetmoe"})
"""Families that pass each key to attention once per expert of a token, and cache it as often."""


def complete_config(config: Fields) -> Fields:
    """The config with the common field names and the defaults of its family."""
    model_type = _model_type(config)
    unread = IGNORED_FIELDS.get(model_type, ())
    read = {name: value for name, value in config.items() if name not in unread}
    renamed = {FIELD_ALIASES[name]: read[name] for name in read if name in FIELD_ALIASES}
    defaults = FAMILY_DEFAULTS.get(model_type, {}).items()
    added = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in defaults}
    return added | _without_nulls(renamed | read)


def _model_type(config: Fields) -> str:
    return bytes(config.get("model_type", b"")).decode().strip('"')


def _without_nulls(config: Fields) -> Fields:
    return {name: value for name, value in config.items() if bytes(value) != b"null"}


_SHAPE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "max_position_embeddings",
)


def check_shape(config: bytes, file: Path) -> None:
    fields = msgspec.json.decode(config, type=Fields)
    missing = [name for name in _SHAPE if name not in fields]
    if missing:
        model_type = _model_type(fields) or "none"
        raise ConfigError(
            f"{file}: {', '.join(missing)} missing: models of type {model_type} lack this field "
            "or use another name for it, and are not supported"
        )


def text_model_config(config: Fields) -> Fields:
    """The config of the text model, with the fields of the whole model; other configs unchanged."""
    if "text_config" not in config:
        return config
    architecture = _architecture(config)
    if (renamed := PUBLISHED_NAMES.get(architecture)) is not None:
        config = config | {"architectures": msgspec.Raw(msgspec.json.encode([renamed]))}
        architecture = renamed
    nested = MULTIMODAL_ARCHITECTURES + TWO_TOWER_ARCHITECTURES
    if architecture not in nested:
        if "hidden_size" in config:  # the config is complete without it
            return config
        raise ConfigError(
            f"config.json: architecture {architecture or 'none'} is not supported:"
            f" of those with a text_config there are {', '.join(nested)}"
        )
    text = parse_json(config["text_config"], Fields, "config.json: text_config")
    for name in OUTER_FIELDS.get(architecture, ()):
        text.pop(name, None)
    # transformers ties weights by the outer config; the inner one may have its class's default.
    outer = ("architectures", "tie_word_embeddings")
    if architecture in TIED_AS_TEXT and bytes(text.get("tie_word_embeddings", b"")) == b"true":
        outer = ("architectures",)
    if "model_type" not in text and architecture in TEXT_TYPES:
        text["model_type"] = msgspec.Raw(f'"{TEXT_TYPES[architecture]}"'.encode())
    if architecture in TIED:
        text.setdefault("tie_word_embeddings", msgspec.Raw(b"true"))
    sizes = TEXT_DEFAULTS.get((architecture, _model_type(text)), {}).items()
    unset = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in sizes}
    flat = (
        unset
        | config
        | _without_nulls(text)
        | {name: config[name] for name in outer if name in config}
    )
    if "quantization_config" in flat:
        # Names of linear layers, and patterns for them, are those of the whole model.
        stored = bytes(flat["quantization_config"])
        for prefix in TEXT_MODEL_PREFIXES:
            stored = stored.replace(prefix.encode(), b"")
        flat["quantization_config"] = msgspec.Raw(stored)
    return flat


def text_name(tensor: str) -> str:
    for prefix in TEXT_MODEL_PREFIXES:
        if tensor.startswith((prefix, f"model.{prefix}")):
            return tensor.replace(prefix, "", 1)
    return tensor


def _architecture(config: Fields) -> str:
    try:
        named = msgspec.json.decode(config.get("architectures", b"[]"), type=tuple[str, ...])
    except msgspec.DecodeError:
        return ""
    return (*named, "")[0]


class _LongRopeScaling(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    original_max_position_embeddings: int | None = None


class _LongRopeFields(msgspec.Struct):
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None
    rope_parameters: _LongRopeScaling | None = None
    rope_scaling: _LongRopeScaling | None = None


def longrope_factors(config: Fields, context_tokens: int | None) -> Factors | None:
    """The factors of a longrope model; None for others, or if the config is malformed.

    transformers uses the short factors for a text up to the trained length, and the long ones for
    all of a longer text. But a cached key is rotated already, and a text may grow: here the served
    context decides for all texts, so that a key is the same in every text.
    """
    try:
        fields = msgspec.json.decode(msgspec.json.encode(config), type=_LongRopeFields)
    except msgspec.DecodeError:
        return None  # the reader of the fields reports the malformed one
    rope = fields.rope_parameters or fields.rope_scaling
    if rope is None or (rope.rope_type or rope.type) not in ("longrope", "su"):
        return None
    if (longest := fields.max_position_embeddings) is None:
        return None
    trained = rope.original_max_position_embeddings or fields.original_max_position_embeddings
    served = longest if context_tokens is None else min(context_tokens, longest)
    return "long" if served > (trained or longest) else "short"


def with_factors(config: Fields, factors: Factors | None) -> Fields:
    """The config with both lists set to those factors; without factors, the config itself."""
    if factors is None:
        return config
    places = ("rope_parameters", "rope_scaling")
    place = next(name for name in places if bytes(config.get(name, b"null")) != b"null")
    rope = msgspec.json.decode(config[place], type=Fields)
    chosen = rope.get(f"{factors}_factor", msgspec.Raw(b"[]"))  # none: refused where it is read
    rope |= {"short_factor": chosen, "long_factor": chosen}
    return config | {place: msgspec.Raw(msgspec.json.encode(rope))}


class Task(StrEnum):
    GENERATE = "generate"
    """Text, token by token; it can also embed."""
    EMBED = "embed"
    """Embeddings only."""
    SCORE = "score"
    """Scores per label, or a reward; it can also embed."""
    DRAFT = "draft"
    """Draft tokens of the model whose hidden states it reads."""


DRAFT_HEADS = ("LlamaForCausalLMEagle3",)
"""Architectures that draft for another model, whose embeddings they use."""


def task_of(architecture: str) -> Task:
    if architecture in DRAFT_HEADS:
        return Task.DRAFT
    if architecture.endswith(("ForSequenceClassification", "ForRewardModel")):
        return Task.SCORE
    # Masked tokens are not served; the layers below their head can embed.
    embeds = architecture.endswith(("Model", "ForMaskedLM"))
    return Task.EMBED if embeds and not architecture.endswith("LMHeadModel") else Task.GENERATE


ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert", "Siglip")
"""Prefixes of architectures with bidirectional attention. Their classifiers have a dense layer of
the hidden size before the last one."""


def is_bidirectional(architecture: str) -> bool:
    """Whether attention is bidirectional: a text is then computed in one pass, and not cached."""
    return architecture.startswith(ENCODERS)


_OTHER_HEADS = (
    *("pooler.", "bert.pooler.", "roberta.pooler."),
    *("cls.", "lm_head.", "head.", "decoder."),  # masked tokens: BERT, RoBERTa, ModernBERT
)


DRAFTED = (
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
)
"""Architectures whose checkpoints have layers that predict tokens beyond the next one."""


def unused_prefixes(architecture: str) -> tuple[str, ...]:
    """Prefixes of tensors in a checkpoint that belong to another task than the architecture's."""
    beyond = ("mtp.",) if architecture in DRAFTED else ()
    if architecture in MULTIMODAL_ARCHITECTURES:
        return (*beyond, *VISION_PREFIXES, *(f"model.{name}" for name in VISION_PREFIXES))
    if architecture in TWO_TOWER_ARCHITECTURES:
        # The linears behind both towers are the poolers' and the encoders'.
        return ("vision_model.", "visual_projection.", "text_projection.", "head.", "logit_")
    if architecture in TRANSCRIBING_ARCHITECTURES:
        return ("model.encoder.",)
    if architecture in DRAFT_HEADS:
        return ("embed_tokens.", "t2d")
    embeds = is_bidirectional(architecture) and task_of(architecture) is Task.EMBED
    return _OTHER_HEADS if embeds else beyond


def head_parameters(architecture: str, hidden: int, labels: int) -> int:
    """Parameters of a classification head; 0 for other models."""
    if task_of(architecture) is not Task.SCORE:
        return 0
    if architecture.endswith("ForRewardModel"):
        return hidden * hidden + hidden
    return (hidden * hidden if architecture.startswith(ENCODERS) else 0) + hidden * labels
