"""Writes the page of the models: `python -m antiphon.model_worker.model.reference [FILE]`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from antiphon.config.markdown import table
from antiphon.config.quantization_file import METHODS as QUANTIZED
from antiphon.layers.methods import METHODS
from antiphon.model_worker.model.config_file import ACTIVATIONS
from antiphon.model_worker.model.formats.gguf import LAYOUTS, READABLE
from antiphon.model_worker.model.load import CACHE_DTYPES
from antiphon.model_worker.model.registry import FAMILIES, find_family
from antiphon.model_worker.model.rope_field import KINDS

PAGE = Path("docs/reference/models.md")
TESTED_AGAINST = "5.23"
"""The transformers that was the reference when a row was last added."""

HEAD = f"""# The models that are served

<!-- Written by `python -m antiphon.model_worker.model.reference`; change the families. -->

By `architectures` of config.json. Each family is compared with transformers (last with
{TESTED_AGAINST}) in float32, and each feature with its absence: [models.md](../models.md) says how.
"""

TAIL = f"""
In every family:

* number formats: float32, bfloat16, float16
* linears (`model.linear`): {", ".join(METHODS)}
* quantized checkpoints (`quant_method` of config.json, see
  [quantization.md](../quantization.md)): {", ".join(QUANTIZED)}
* keys and values (`cache.dtype`, see [quantization.md](../quantization.md)): as the model
  computes, {", ".join(CACHE_DTYPES)}; the latter not with capped scores or sinks, nor in float16
* rotations: {", ".join(KINDS)}
* activations: {", ".join(ACTIVATIONS)}
* files: safetensors, torch's, and of the architectures {", ".join(LAYOUTS)} GGUF
  ({", ".join(kind.name for kind in READABLE)})
"""


def page() -> str:
    """The whole page."""
    rows = [
        (f"`{architecture}`", about, ", ".join(features) or "Llama's shape")
        for architecture, (about, features) in sorted(_families().items())
    ]
    head = ("architecture", "models", "what it has beside Llama's shape")
    return "\n".join([HEAD, *table(head, rows)]) + "\n" + TAIL


def main() -> None:
    """Write the page to the file that is named, or to its place."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), "utf-8")


def _families() -> dict[str, tuple[str, tuple[str, ...]]]:
    """By architecture: the first line of the family's file, and its features."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for architecture in FAMILIES:
        family = find_family((architecture,))
        layers = family.layers_of or family
        module = inspect.getmodule(layers.declare)
        about = (inspect.getdoc(module) or "").partition("\n")[0]
        beside = family.features if layers is family else (*layers.features, *family.features)
        found[architecture] = (about, beside)
    return found


if __name__ == "__main__":
    main()
