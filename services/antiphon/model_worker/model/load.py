"""A model folder becomes a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.config.errors import ConfigError
from antiphon.config.model_files import files_at
from antiphon.config.weights import read_weights
from antiphon.layers.methods import METHODS, unfit
from antiphon.layers.tp import SingleRank
from antiphon.layers.weights import Build
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.declare import read_spec
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.remote_code import family_of
from antiphon.model_worker.model.weights import Checkpoint

if TYPE_CHECKING:
    from antiphon.config.model_files import ModelFiles, Place
    from antiphon.layers.tp import Tp
    from antiphon.model_worker.model.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with its weights, on one rank."""

    spec: ModelSpec
    decoder: Decoder
    build: Build


def load(
    place: Place,
    *,
    dtype: str = "auto",
    linear: str = "plain",
    device: str = "cpu",
    tp: Tp | None = None,
) -> Model:
    """Build the decoder that config.json describes and fill it from the weights.

    Args:
        place: The model: its folder in the Hugging Face layout, or its files.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
        linear: How its linears are kept: a name of `layers.methods.METHODS`.
        device: A torch device.
        tp: This rank among those that share the layers; unset for one alone.

    Raises:
        ModelLoadError: Anything is missing, unknown or does not fit; nothing has run by then.
    """
    try:
        files = files_at(place)
        config = read_config(files)
        spec = read_spec(family_of(config.architectures, files), config)
        chosen = _dtype(dtype, config.dtype or config.torch_dtype, files)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
    build = Build(tp or SingleRank(), chosen, torch.device(device))
    if lacks := unfit(linear, build.device, chosen):
        raise ModelLoadError(f"linears cannot be kept as {linear!r} here: {lacks}")
    try:
        decoder = Decoder(spec, build, method=METHODS[linear])
    except ValueError as error:
        raise ModelLoadError(f"{files.folder}: {error}") from error
    fill(decoder, Checkpoint.open(files, list(decoder.sources())), spec)
    return Model(spec, decoder, build)


def fill(decoder: Decoder, checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Copy a checkpoint into a decoder of all layers.

    Raises:
        ModelLoadError: They do not fit each other; nothing was copied.
    """
    sources = list(decoder.sources())
    # A tied model's checkpoint may still carry the head; it is the embedding.
    head = (f"{spec.head.name}.weight",) if spec.head.tied else ()
    checkpoint.complete(spec.prefix)
    checkpoint.compare(sources, spec.ignored + head)
    checkpoint.load(sources)
    decoder.pack()


def _dtype(asked: str, named: str | None, files: ModelFiles) -> torch.dtype:
    if asked != "auto":
        return DTYPES[asked]
    if named is None:
        # As the plan decides it, see `antiphon.config.card`.
        named = read_weights(files, torch.float32.itemsize).dtype or "float32"
    if named not in DTYPES:
        raise ModelLoadError(
            f"config.json: dtype {named!r} is not supported: there are {', '.join(DTYPES)}"
        )
    return DTYPES[named]
