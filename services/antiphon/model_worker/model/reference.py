"""Writes the reference page of models: `python -m antiphon.model_worker.model.reference [FILE]`."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import version
from pathlib import Path

import transformers

from antiphon.config.markdown import table
from antiphon.layers.methods import METHODS
from antiphon.model_card.quantization_config import METHODS as QUANTIZED
from antiphon.model_worker.model.config_file import ACTIVATIONS
from antiphon.model_worker.model.formats.gguf import LAYOUTS, READABLE
from antiphon.model_worker.model.load import CACHE_DTYPES
from antiphon.model_worker.model.registry import FAMILIES, find_family
from antiphon.model_worker.model.rope_field import KINDS
from antiphon.model_worker.model.support import attention, refusal, sample

PAGE = Path("docs/reference/models.md")
REFERENCE = "transformers"
"""The package that our models are compared with, in the version that the tests install."""
GGUF = frozenset(
    name for layout in LAYOUTS.values() for name in (layout.model, layout.with_experts) if name
)

HEAD = """# The models that are served

<!-- Written by `python -m antiphon.model_worker.model.reference`; change the families. -->

By `architectures` of config.json. Each family is compared with the reference in float32, and each
feature with its absence: [models.md](../models.md) says how. Grouped-query attention may have one
key-value head, or as many as it has query heads. Any other causal model of transformers runs
through transformers' own modules, in plain numbers.
"""
STORED_HEAD = """
## In fewer bits

By `quant_method` of config.json, see [quantization.md](../quantization.md). What cannot be read is
refused at the start. GGUF files say by themselves how they are stored.
"""

TAIL = f"""
In every family:

* number formats: float32, bfloat16, float16
* linears (`model.linear`): {", ".join(METHODS)}
* keys and values (`cache.dtype`, see [quantization.md](../quantization.md)): as the model
  computes, {", ".join(CACHE_DTYPES)}; the latter not with capped scores or sinks, nor in float16
* rotations: {", ".join(KINDS)}
* activations: {", ".join(ACTIVATIONS)}
* files: safetensors, torch's, and of the architectures {", ".join(LAYOUTS)} GGUF
  ({", ".join(kind.name for kind in READABLE)})
"""


def page() -> str:
    """The whole page."""
    models: list[tuple[str, ...]] = []
    stored: list[tuple[str, ...]] = []
    reasons: dict[str, int] = {}
    for architecture, (about, features) in sorted(_families().items()):
        spec = sample(architecture)
        listed = ", ".join(features) or "Llama's shape"
        models.append(
            (f"`{architecture}`", about, attention(spec), listed, _compared(architecture))
        )
        cells = [_cell(refusal(spec, method), reasons) for method in QUANTIZED]
        cells.append("yes" if architecture in GGUF else "no")
        stored.append((f"`{architecture}`", *cells))
    head = (
        "architecture",
        "models",
        "attention",
        "what it has beside Llama's shape",
        "compared with",
    )
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    parts = [HEAD, *table(head, models), STORED_HEAD]
    parts += [*table(("architecture", *QUANTIZED, "GGUF"), stored), "", *notes]
    return "\n".join(parts) + "\n" + TAIL


def _cell(reason: str | None, reasons: dict[str, int]) -> str:
    """`yes`, or `no` with the number of the footnote with the reason."""
    return "yes" if reason is None else f"no ({reasons.setdefault(reason, len(reasons) + 1)})"


def _compared(architecture: str) -> str:
    """The reference implementation, and which part of it is compared."""
    # Looked up in the listing: accessing the attribute would import every model.
    own = "" if architecture in dir(transformers) else ", its layers only"
    return f"{REFERENCE} {'.'.join(version(REFERENCE).split('.')[:2])}{own}"


def main() -> None:
    """Write the page to the given file, or to its default path."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), "utf-8")


def _families() -> dict[str, tuple[str, tuple[str, ...]]]:
    """By architecture: the first line of the family's docstring, and its features."""
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
