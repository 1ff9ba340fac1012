"""Finds the files of a model on this machine: its description and its weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import LoadFormat
from antiphon.model_card.config_json import (
    Factors,
    Fields,
    complete_config,
    longrope_factors,
    parse_json,
    read_json,
    text_model_config,
    with_factors,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

INDICES = {
    LoadFormat.SAFETENSORS: "model.safetensors.index.json",
    LoadFormat.PT: "pytorch_model.bin.index.json",
}
ENDINGS = {
    LoadFormat.SAFETENSORS: (".safetensors",),
    LoadFormat.PT: (".bin", ".pt"),
    LoadFormat.GGUF: (".gguf",),
}
"""File endings by format, in the order that `auto` tries; the first ending found is used."""
NO_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)
"""Files of trainers that are not weights."""
SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


class ModelFiles(msgspec.Struct, frozen=True):
    folder: Path
    """The folder with config.json."""
    format: LoadFormat
    """The format of the weights; never `auto`."""
    weights: tuple[Path, ...]
    """The weight files, each once; empty if there are none."""
    overrides: str = "{}"
    """JSON object whose fields replace those of config.json."""
    mapped: bool = True
    """Whether files are mapped into memory, not copied."""
    context_tokens: int | None = None
    """The served context length, if it is less than the model's."""

    @property
    def overridden(self) -> bool:
        if _object(self.overrides, "load.config_overrides"):
            return True
        return self.factors() != longrope_factors(self._completed(), None)

    def factors(self) -> Factors | None:
        return longrope_factors(self._completed(), self.context_tokens)

    def config(self) -> bytes:
        """Return config.json with overrides applied and defaults filled in.

        For a longrope model both lists of factors are set to the ones for the served context.
        """
        config = self._completed()
        factors = longrope_factors(config, self.context_tokens)
        return msgspec.json.encode(with_factors(config, factors))

    def _completed(self) -> Fields:
        file = self.folder / "config.json"
        try:
            config = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from error
        overrides = _object(self.overrides, "load.config_overrides")
        fields = self._with_quantization(_object(config, str(file)))
        text_config = text_model_config(fields)
        return complete_config(_override(text_config, overrides))

    def _with_quantization(self, config: Fields) -> Fields:
        """The config with what older versions of ModelOpt wrote to a file of its own."""
        file = self.folder / "hf_quant_config.json"
        if "quantization_config" in config or not file.exists():
            return config
        written = parse_json(file.read_bytes(), _ModelOptFile, str(file)).quantization
        said = {"quant_method": msgspec.Raw(b'"modelopt"'), **written}
        return config | {"quantization_config": msgspec.Raw(msgspec.json.encode(said))}


class _ModelOptFile(msgspec.Struct):
    quantization: Fields


ModelLocation = Path | ModelFiles
"""A model's folder or GGUF file, or the files found there."""


def files_at(location: ModelLocation) -> ModelFiles:
    return location if isinstance(location, ModelFiles) else find_files(location)


def find_files(
    path: Path,
    requested: LoadFormat = LoadFormat.AUTO,
    *,
    described_in: Path | None = None,
    overrides: str = "{}",
    mapped: bool = True,
    context_tokens: int | None = None,
) -> ModelFiles:
    """Find a model's files by its folder, or by a GGUF file, which may be one part of several.

    `described_in` is the folder of config.json, if that is another one than the weights'.
    """
    folder, names = path, list[str]()
    if is_gguf(path):
        folder, names = path.parent, [path.name]
        if SHARD.search(path.name):
            names = [file.name for file in folder.glob("*.gguf") if _of_one(file.name, path.name)]
        if requested is LoadFormat.AUTO:
            requested = LoadFormat.GGUF
    elif folder.is_dir():
        names = [file.name for file in folder.iterdir()]
    format_, chosen = weight_names(folder, names, requested)
    weights = tuple(folder / name for name in chosen)
    return ModelFiles(described_in or folder, format_, weights, overrides, mapped, context_tokens)


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f} GiB"


def refuse_full_disk(folder: Path, size_bytes: int, needs: str) -> None:
    """Raise `ConfigError` if the folder's disk has less space than `needs`, which says what for."""
    free_bytes = shutil.disk_usage(folder).free
    if size_bytes > free_bytes:
        raise ConfigError(f"{needs} {gib(size_bytes)}; only {gib(free_bytes)} free in {folder}")


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


def weight_names(
    folder: Path, names: Collection[str], requested: LoadFormat
) -> tuple[LoadFormat, list[str]]:
    """Choose the weight files among the file `names` of a folder (also before they are downloaded).

    For a format with an index, exactly the files of the index, whether they exist or not.
    """
    if requested is LoadFormat.DUMMY:
        return requested, []
    looked_for = list(ENDINGS) if requested is LoadFormat.AUTO else [requested]
    for format_ in looked_for:
        if found := _of_format(folder, names, format_):
            return format_, sorted(found)
    return looked_for[0], []


def _of_format(folder: Path, names: Collection[str], format_: LoadFormat) -> set[str]:
    if (index := INDICES.get(format_)) is not None and index in names:
        return _indexed(folder / index)
    for ending in ENDINGS[format_]:
        found = {name for name in names if name.endswith(ending) and name not in NO_WEIGHTS}
        # Mistral's repositories contain the same weights twice, once under names of their own.
        found = {name for name in found if not name.startswith("consolidated")} or found
        if format_ is LoadFormat.GGUF:
            _refuse_several(folder, found)
        if found:
            return found
    return set()


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _indexed(index: Path) -> set[str]:
    files = set(read_json(index, _Index).weight_map.values())
    if outside := [name for name in files if Path(name).name != name]:
        raise ConfigError(f"{index}: {outside[0]} is not in the same folder")
    return files


def _refuse_several(folder: Path, names: Iterable[str]) -> None:
    """Raise for several GGUF files: repositories often have one model in many quantizations."""
    first, *others = sorted(names) or [""]
    if any(not _of_one(name, first) for name in others):
        listed = ", ".join([first, *others])
        raise ConfigError(f"{folder}: several GGUF models; use the path of one of {listed}")


def _of_one(name: str, other: str) -> bool:
    ours, theirs = SHARD.search(name), SHARD.search(other)
    if ours is None or theirs is None:
        return False
    return (name[: ours.start()], ours[1]) == (other[: theirs.start()], theirs[1])


_BEYOND_JSON = re.compile(r"(?<=[\[:,\s])(-?Infinity|NaN)(?=\s*[,\]}])")


def _object(text: bytes | str, what: str) -> Fields:
    try:
        return msgspec.json.decode(text, type=Fields)
    except msgspec.DecodeError:
        pass
    # Such files are written with Python's json, which has numbers that JSON lacks; newer versions
    # of transformers write them as objects, and so does this.
    written = text if isinstance(text, str) else text.decode(errors="replace")
    spelled = _BEYOND_JSON.sub(r'{"__float__": "\1"}', written)
    return parse_json(spelled, Fields, what)


def _override(config: Fields, overrides: Fields) -> Fields:
    """Newer files have theta and scaling in `rope_parameters`; overrides use the older names."""
    merged = config | overrides
    older = {"rope_theta", "rope_scaling"} & overrides.keys()
    if not older or "rope_parameters" in overrides or "rope_parameters" not in config:
        return merged
    rope = _object(bytes(config["rope_parameters"]), "config.json: rope_parameters")
    if "rope_scaling" in overrides:
        scaling = bytes(overrides["rope_scaling"])
        theta = {name: rope[name] for name in rope if name == "rope_theta"}
        rope = theta | ({} if scaling == b"null" else _object(scaling, "rope_scaling"))
    if "rope_theta" in overrides:
        rope["rope_theta"] = overrides["rope_theta"]
    return merged | {"rope_parameters": msgspec.Raw(msgspec.json.encode(rope))}
