"""Which family serves an architecture; a family is imported when a model asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from antiphon.model_worker.model.spec import Family

FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "antiphon.model_worker.model.families.llama:LLAMA",
    "Qwen2ForCausalLM": "antiphon.model_worker.model.families.qwen2:QWEN2",
    "Qwen3ForCausalLM": "antiphon.model_worker.model.families.qwen3:QWEN3",
}


def find_family(architectures: tuple[str, ...]) -> Family:
    """The family of the first architecture that we serve.

    Raises:
        ModelLoadError: None is; names those that are.
    """
    for architecture in architectures:
        if target := FAMILIES.get(architecture):
            module, _, name = target.partition(":")
            return cast("Family", getattr(importlib.import_module(module), name))
    named = ", ".join(architectures) or "none"
    raise ModelLoadError(
        f"config.json: architecture {named} is not supported: there are {', '.join(FAMILIES)}"
    )
