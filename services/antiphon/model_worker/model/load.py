"""A model folder becomes a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.layers.tp import SingleRank
from antiphon.layers.weights import Build
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.registry import find_family
from antiphon.model_worker.model.spec import ModelSpec, read_spec
from antiphon.model_worker.model.weights import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.layers.tp import Tp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with its weights, on one rank."""

    spec: ModelSpec
    decoder: Decoder
    build: Build


def load(folder: Path, *, dtype: str = "auto", device: str = "cpu", tp: Tp | None = None) -> Model:
    """Build the decoder that config.json describes and fill it from the safetensors.

    Args:
        folder: In the Hugging Face layout.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
        device: A torch device.
        tp: This rank among those that share the layers; unset for one alone.

    Raises:
        ModelLoadError: Anything is missing, unknown or does not fit; nothing has run by then.
    """
    config = read_config(folder)
    spec = read_spec(find_family(config.architectures), config)
    checkpoint = Checkpoint.open(folder)
    named = config.dtype or config.torch_dtype
    chosen = _dtype(dtype, named, checkpoint)
    build = Build(tp or SingleRank(), chosen, torch.device(device))
    try:
        decoder = Decoder(spec, build)
    except ValueError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    fill(decoder, checkpoint, spec)
    return Model(spec, decoder, build)


def fill(decoder: Decoder, checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Copy a checkpoint into a decoder of all layers.

    Raises:
        ModelLoadError: They do not fit each other; nothing was copied.
    """
    sources = list(decoder.sources())
    # A tied model's checkpoint may still carry the head; it is the embedding.
    head = (f"{spec.names.head}.weight",) if spec.tied else ()
    checkpoint.compare(sources, spec.names.ignored + head)
    checkpoint.load(sources)
    decoder.pack()


def _dtype(asked: str, named: str | None, checkpoint: Checkpoint) -> torch.dtype:
    if asked != "auto":
        return DTYPES[asked]
    if named is not None:
        if named not in DTYPES:
            raise ModelLoadError(
                f"config.json: dtype {named!r} is not supported: there are {', '.join(DTYPES)}"
            )
        return DTYPES[named]
    counts: Counter[torch.dtype] = Counter()
    for tensor in checkpoint.tensors.values():
        counts[tensor.dtype] += tensor.count
    return counts.most_common(1)[0][0]
