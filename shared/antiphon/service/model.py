"""Where the served model is on this machine, and what clients call it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.model_files import ModelFiles, find_files, is_gguf
from antiphon.service.hub import fetch, is_hub_id, looks_like_id
from antiphon.wire.ids import ModelName

if TYPE_CHECKING:
    from antiphon.config.settings import Settings

EMBEDDED = "embedded"


def model_files(settings: Settings, *, weights: bool = True) -> ModelFiles:
    """Return the model's files, fetched first if it is a model of the hub. May block for long.

    Args:
        settings: Say which model.
        weights: Whether the weights must be there too, or only what describes them.

    Raises:
        ConfigError: There is no such model; says what is missing.
    """
    load = settings.load
    place = _place(settings, weights=weights)
    return find_files(
        place,
        load.format,
        described_in=_described_in(settings, place),
        overrides=load.config_overrides,
        mapped=load.mmap,
    )


def tokenizer_folder(settings: Settings) -> Path:
    """Return the folder of the tokenizer: its own setting, else the model's.

    Raises:
        ConfigError: There is no such folder, or it holds no tokenizer.json.
    """
    named = "model.tokenizer_path" if settings.model.tokenizer_path else "model.path"
    return _holding(tokenizer_place(settings), "tokenizer.json", named)


def tokenizer_place(settings: Settings) -> Path:
    """Return where a tokenizer would be, whether one is there or not.

    Raises:
        ConfigError: There is no such model.
    """
    path = settings.model.tokenizer_path
    if not path:
        return _described_in(settings, _place(settings, weights=False))
    if is_hub_id(path):
        # A revision names a state of one model; of another it would be any state or none.
        revision = settings.load.revision if path == settings.model.path else ""
        return fetch(path, replace(settings.load, revision=revision), weights=False)
    return Path(path).expanduser()


def served_name(settings: Settings) -> ModelName:
    """Return what clients call the model: as configured, else the hub's id or the folder's name.

    It depends on the text of the path alone, since not every process has the model beside it.
    """
    if settings.cluster.model:
        return ModelName(settings.cluster.model)
    path = settings.model.path
    if path == EMBEDDED:
        return ModelName(embedded.SERVED_NAME)
    if looks_like_id(path):
        return ModelName(path)
    folder = Path(path).expanduser().resolve()
    return ModelName(folder.stem if is_gguf(folder) else folder.name)


def hub_models(settings: Settings) -> tuple[str, ...]:
    """Return the models of the hub that the settings name."""
    model = settings.model
    named = {path for path in (model.path, model.tokenizer_path) if path not in ("", EMBEDDED)}
    return tuple(sorted(path for path in named if is_hub_id(path)))


def _place(settings: Settings, *, weights: bool) -> Path:
    """The folder or GGUF file that `model.path` names."""
    path = settings.model.path
    if path == EMBEDDED:
        return embedded.path()
    if is_hub_id(path):
        return fetch(path, settings.load, weights=weights)
    place = Path(path).expanduser()
    if weights and is_gguf(place) and not place.is_file():
        raise ConfigError(f"model.path: {place}: no such file")
    return place


def _described_in(settings: Settings, place: Path) -> Path:
    """The folder of config.json."""
    if not is_gguf(place):
        return _holding(place, "config.json", "model.path")
    if (place.parent / "config.json").is_file():
        return place.parent
    if settings.model.tokenizer_path:
        return _holding(tokenizer_place(settings), "config.json", "model.tokenizer_path")
    raise ConfigError(
        f"model.path: {place}: no config.json beside it; name the model it was made from, "
        "a folder or a model of the hub, as model.tokenizer_path"
    )


def _holding(folder: Path, file: str, setting: str) -> Path:
    if not (folder / file).is_file():
        raise ConfigError(f"{setting}: {folder} holds no {file}")
    return folder
