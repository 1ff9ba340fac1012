"""Pooling of a text to one vector: by sentence-transformers' files, else by model defaults.

modules.json of a sentence-transformers folder lists the modules after the model itself: pooling,
dense layers, and normalization.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import (
    TWO_TOWER_ARCHITECTURES,
    Task,
    is_bidirectional,
    parse_json,
    read_json,
)
from antiphon.model_card.files import ModelLocation, files_at, find_files
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_card.card import ModelCard


class PoolMode(StrEnum):
    LAST = "last"
    """The vector of the last token."""
    CLS = "cls"
    """The vector of the first token."""
    MEAN = "mean"
    """The mean of all token vectors."""
    END = "end"
    """The vector of the first end token, or of the last token if there is none."""


class PoolingActivation(StrEnum):
    IDENTITY = "identity"
    TANH = "tanh"
    RELU = "relu"
    GELU = "gelu"
    SIGMOID = "sigmoid"


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A dense layer after the pooling; its weights `name` are in the subfolder `folder`."""

    folder: str
    name: str = "linear"
    inputs: int
    outputs: int
    bias: bool
    squash: PoolingActivation


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    task: Task
    """Never `generate`."""
    mode: PoolMode
    end_id: int | None = None
    """The end token of the mode `end`; None: the first token with the highest id of the text."""
    dense: tuple[Dense, ...] = ()
    normalize: bool
    """Whether the vector is then normalized to length 1."""
    card: PoolingCard
    """The output, as gateways see it."""

    def __str__(self) -> str:
        dense = (f"dense {dense.outputs}" for dense in self.dense)
        return ", ".join([self.mode, *dense, *(["normalised"] if self.normalize else [])])


def read_pooling(
    location: ModelLocation, card: ModelCard, *, embedding: bool = False
) -> Pooling | None:
    """The pooling of a model; None for a generative one, unless it is served for `embedding`."""
    task = Task.EMBED if embedding and card.task is Task.GENERATE else card.task
    if task is Task.GENERATE:
        return None
    files = files_at(location)
    config = parse_json(files.config(), _PoolingFields, files.folder / "config.json")
    habit = _default_mode(card)
    if task is Task.SCORE:
        scores = PoolingCard(
            scores=True,
            width=len(card.labels),
            labels=card.labels,
            several=config.problem_type == "multi_label_classification",
            plain_score=config.scores_plainly,
        )
        mode = config.classifier_pooling or habit
        return Pooling(task=task, mode=mode, normalize=False, card=scores)
    output = PoolingCard(
        width=card.hidden_size,
        matryoshka=config.is_matryoshka or bool(config.matryoshka_dimensions),
        cuts=tuple(sorted(config.matryoshka_dimensions or ())),
    )
    pooling = Pooling(task=task, mode=habit, normalize=True, card=output)
    if card.architecture in TWO_TOWER_ARCHITECTURES:
        source = files.folder / "config.json"
        return _projected(pooling, card.architecture, config, source)
    listing = files.folder / "modules.json"
    if not listing.exists():
        return pooling
    return _apply_modules(pooling, files.folder, read_json(listing, tuple[_Module, ...]))


def module_files(folder: Path) -> list[Path]:
    """The sentence-transformers files in a model's folder: modules.json, and the files it lists."""
    listing = folder / "modules.json"
    if not listing.exists():
        return []
    files = [listing]
    for module in read_json(listing, tuple[_Module, ...]):
        below = folder / module.path
        if below != folder:
            found = (below / "config.json", *find_files(below).weights)
            files += [file for file in found if file.exists()]
    return files


def _default_mode(card: ModelCard) -> PoolMode:
    """LAST for decoders, whose last token attends to all; CLS for encoders."""
    if card.causal:
        return PoolMode.LAST
    return PoolMode.CLS if is_bidirectional(card.architecture) else PoolMode.MEAN


class _Sentence(msgspec.Struct):
    activation_fn: str | None = None


class _PoolingFields(msgspec.Struct):
    problem_type: str | None = None
    classifier_pooling: PoolMode | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] | None = None
    sbert_ce_default_activation_function: str | None = None
    sentence_transformers: _Sentence | None = None
    projection_dim: int = 512
    projection_size: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @property
    def scores_plainly(self) -> bool:
        """Newer files name the activation of a score under `sentence_transformers`."""
        newer = self.sentence_transformers and self.sentence_transformers.activation_fn
        named = newer or self.sbert_ce_default_activation_function
        return named is not None and named.rpartition(".")[2] == "Identity"


_FORMER_END = 2
"""The end token of CLIPs that were published before their configs had the right one. Texts end with
the highest id there."""


def _projected(
    pooling: Pooling, architecture: str, config: _PoolingFields, source: Path
) -> Pooling:
    """The end token of CLIP and the last token of SigLIP, projected, are compared with images."""
    width = pooling.card.width
    clip = architecture == "CLIPModel"
    dense = Dense(
        folder="",
        name="text_projection" if clip else "head",
        inputs=width,
        outputs=config.projection_dim if clip else config.projection_size or width,
        bias=not clip,
        squash=PoolingActivation.IDENTITY,
    )
    card = replace(pooling.card, width=dense.outputs, images=True)
    pooling = replace(pooling, mode=PoolMode.LAST, dense=(dense,), card=card)
    if not clip:
        return pooling
    end = config.eos_token_id
    if not isinstance(end, int):
        raise ConfigError(f"{source}: eos_token_id = {end}: must be one id, that of the end token")
    return replace(pooling, mode=PoolMode.END, end_id=None if end == _FORMER_END else end)


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _PoolFile(msgspec.Struct):
    pooling_mode: str | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False


class _DenseFile(msgspec.Struct):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"


_MODES = {
    "cls": PoolMode.CLS,
    "cls_token": PoolMode.CLS,
    "mean": PoolMode.MEAN,
    "mean_tokens": PoolMode.MEAN,
    "lasttoken": PoolMode.LAST,
}


def _apply_modules(habit: Pooling, folder: Path, modules: tuple[_Module, ...]) -> Pooling:
    pooling, listing = replace(habit, normalize=False), folder / "modules.json"
    for module in modules:
        kind = module.type.rpartition(".")[2]
        file = folder / module.path / "config.json"
        if kind == "Transformer" and module.path not in ("", "."):
            raise ConfigError(f"{listing}: the model is in {module.path}; serve that folder")
        if kind in ("Transformer", "Dropout"):
            continue
        if pooling.normalize:
            raise ConfigError(f"{listing}: {kind} after Normalize is not supported")
        match kind:
            case "Pooling":
                pooling = replace(pooling, mode=_mode(file))
            case "Dense":
                dense = _dense(module.path, file, pooling.card.width)
                output = replace(pooling.card, width=dense.outputs)
                pooling = replace(pooling, dense=(*pooling.dense, dense), card=output)
            case "Normalize":
                pooling = replace(pooling, normalize=True)
            case _:
                raise ConfigError(f"{listing}: the module {kind} is not supported")
    return pooling


def _mode(file: Path) -> PoolMode:
    fields = read_json(file, _PoolFile)
    flags = [name for name in fields.__struct_fields__ if name != "pooling_mode"]
    modes = [name.removeprefix("pooling_mode_") for name in flags if getattr(fields, name)]
    if fields.pooling_mode is not None:
        modes = [fields.pooling_mode]
    if len(modes) != 1 or modes[0] not in _MODES:
        named = " and ".join(modes) or "none"
        raise ConfigError(f"{file}: pooling {named} is not supported, only cls, mean and last")
    return _MODES[modes[0]]


def _dense(path: str, file: Path, width: int) -> Dense:
    fields = read_json(file, _DenseFile)
    inputs = fields.in_features
    if inputs != width:
        raise ConfigError(f"{file}: in_features = {inputs}: must be {width}, as the input has")
    name = fields.activation_function.rpartition(".")[2].lower()
    if name not in set(PoolingActivation):
        raise ConfigError(f"{file}: activation_function {name} is not supported")
    return Dense(
        folder=path,
        inputs=inputs,
        outputs=fields.out_features,
        bias=fields.bias,
        squash=PoolingActivation(name),
    )
