"""The text model within a multimodal one: its config, and the names of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from antiphon.model_card.config_json import Fields

MULTIMODAL_ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
"""Multimodal architectures whose text model is served."""
TEXT_MODEL_PREFIX = "language_model."
"""Prefix of its tensor names, first or after the common prefix."""
_TIED = "tie_word_embeddings"
VISION_PREFIXES = ("vision_tower.", "vision_model.", "multi_modal_projector.")
"""Prefixes of vision tensors."""


def text_model_config(config: Fields) -> Fields:
    """The config of the text model, with the fields of the whole model; other configs unchanged.

    Raises:
        ConfigError: The text config is not a JSON object, or the architecture is not supported.
    """
    if "text_config" not in config:
        return config
    architecture = _architecture(config)
    if not is_multimodal(architecture):
        if "hidden_size" in config:  # the config is complete without it
            return config
        raise ConfigError(
            f"config.json: architecture {architecture or 'none'} is not supported:"
            f" of those with a text_config there are {', '.join(MULTIMODAL_ARCHITECTURES)}"
        )
    try:
        text = msgspec.json.decode(config["text_config"], type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ConfigError(f"config.json: text_config: {error}") from error
    given = {name: value for name, value in text.items() if bytes(value) != b"null"}
    # transformers ties weights by the outer config; the inner one may have its class's default.
    whole = {name: config[name] for name in ("architectures", _TIED) if name in config}
    flat = config | given | whole
    if "quantization_config" in flat:
        # Names of linear layers, and patterns for them, are those of the whole model.
        stored = bytes(flat["quantization_config"]).replace(TEXT_MODEL_PREFIX.encode(), b"")
        flat["quantization_config"] = msgspec.Raw(stored)
    return flat


def text_name(tensor: str) -> str:
    """The name of a tensor in the text model alone."""
    return (
        tensor.replace(TEXT_MODEL_PREFIX, "", 1)
        if tensor.startswith((TEXT_MODEL_PREFIX, f"model.{TEXT_MODEL_PREFIX}"))
        else tensor
    )


def is_multimodal(architecture: str) -> bool:
    """Whether an architecture is multimodal and its text model is served."""
    return architecture in MULTIMODAL_ARCHITECTURES


def _architecture(config: Fields) -> str:
    try:
        named = msgspec.json.decode(config.get("architectures", b"[]"), type=tuple[str, ...])
    except msgspec.DecodeError:
        return ""
    return (*named, "")[0]
