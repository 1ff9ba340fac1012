"""The model of text within one that sees, too: its config, and the names of its tensors."""

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
"""Architectures whose model of text is served."""
TEXT_MODEL_PREFIX = "language_model."
"""What the names of its tensors have, first or after the name of all."""
_TIED = "tie_word_embeddings"
VISION_PREFIXES = ("vision_tower.", "vision_model.", "multi_modal_projector.")
"""How tensors begin that see."""


def text_model_config(config: Fields) -> Fields:
    """The config of the model of text, with what is said of the whole; any other as it is.

    Raises:
        ConfigError: The part is no JSON object, or no model of which a part is served.
    """
    if "text_config" not in config:
        return config
    architecture = _architecture(config)
    if not is_multimodal(architecture):
        if "hidden_size" in config:  # it says of itself what there is to say
            return config
        raise ConfigError(
            f"config.json: architecture {architecture or 'none'} is not supported:"
            f" of those with a text_config there are {', '.join(MULTIMODAL_ARCHITECTURES)}"
        )
    try:
        text = msgspec.json.decode(config["text_config"], type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ConfigError(f"config.json: text_config: {error}") from error
    said = {name: value for name, value in text.items() if bytes(value) != b"null"}
    # transformers ties by what the whole says; the part may say the default of its class.
    whole = {name: config[name] for name in ("architectures", _TIED) if name in config}
    flat = config | said | whole
    if "quantization_config" in flat:
        # Names of linears, and patterns of them, are those of the whole.
        stored = bytes(flat["quantization_config"]).replace(TEXT_MODEL_PREFIX.encode(), b"")
        flat["quantization_config"] = msgspec.Raw(stored)
    return flat


def text_name(tensor: str) -> str:
    """What a tensor is called where there is the model of text alone."""
    return (
        tensor.replace(TEXT_MODEL_PREFIX, "", 1)
        if tensor.startswith((TEXT_MODEL_PREFIX, f"model.{TEXT_MODEL_PREFIX}"))
        else tensor
    )


def is_multimodal(architecture: str) -> bool:
    """Whether a model of an architecture sees, and its model of text is served."""
    return architecture in MULTIMODAL_ARCHITECTURES


def _architecture(config: Fields) -> str:
    try:
        named = msgspec.json.decode(config.get("architectures", b"[]"), type=tuple[str, ...])
    except msgspec.DecodeError:
        return ""
    return (*named, "")[0]
