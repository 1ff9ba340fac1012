"""Models whose text part may be of one of several families; embeddings come from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.model.errors import UnsupportedVariant
from antiphon.model_worker.model.families.llama import declare_llama, declare_mistral
from antiphon.model_worker.model.families.qwen import (
    declare_qwen2,
    declare_qwen3,
    declare_qwen3_moe,
)
from antiphon.model_worker.model.spec import ModelFamily, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from antiphon.model_worker.model.config_file import ConfigFile

    Texts = Mapping[str, Callable[[ConfigFile], ModelSpec]]
    """By `model_type` of the text model: its declaration; the first one is the default."""

NEXT_TEXTS: Texts = {
    "llama": declare_llama,
    "mistral": declare_mistral,
    "qwen2": declare_qwen2,
}
INTERN_TEXTS: Texts = {
    "qwen2": declare_qwen2,
    "qwen3": declare_qwen3,
    "qwen3_moe": declare_qwen3_moe,
    "llama": declare_llama,
}


def declare_internvl(config: ConfigFile) -> ModelSpec:
    """InternVL 3 and 3.5: the text model is Qwen2, Qwen3 or Llama; tiles come from outside."""
    return _declare(config, INTERN_TEXTS, "InternVL")


def declare_llava_next(config: ConfigFile) -> ModelSpec:
    """LLaVA-NeXT, OneVision: the text model is Llama, Mistral or Qwen2; tiles come from outside."""
    return _declare(config, NEXT_TEXTS, "LLaVA-NeXT")


def _declare(config: ConfigFile, texts: Texts, name: str) -> ModelSpec:
    kind = config.model_type or next(iter(texts))
    if kind not in texts:
        raise UnsupportedVariant(
            f"config.json: text_config: model_type {config.model_type!r} is not supported in"
            f" {name}: there are {', '.join(texts)}"
        )
    return texts[kind](config)


INTERNVL = ModelFamily("internvl", declare_internvl)
LLAVA_NEXT = ModelFamily("llava-next", declare_llava_next)
