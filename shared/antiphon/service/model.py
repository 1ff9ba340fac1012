"""Where the served model is on this machine, and what clients call it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.wire.ids import ModelName

if TYPE_CHECKING:
    from antiphon.config.settings import Settings

EMBEDDED = "embedded"


def model_folder(settings: Settings) -> Path:
    """Return the folder of the model's config and weights.

    Raises:
        ConfigError: There is no such folder, or it holds no config.json.
    """
    path = settings.model.path
    folder = embedded.path() if path == EMBEDDED else Path(path).expanduser()
    return _holding(folder, "config.json", "model.path")


def tokenizer_folder(settings: Settings) -> Path:
    """Return the folder of the tokenizer: its own setting, else the model's.

    Raises:
        ConfigError: There is no such folder, or it holds no tokenizer.json.
    """
    if settings.model.tokenizer_path:
        folder = Path(settings.model.tokenizer_path).expanduser()
        return _holding(folder, "tokenizer.json", "model.tokenizer_path")
    return _holding(model_folder(settings), "tokenizer.json", "model.path")


def served_name(settings: Settings) -> ModelName:
    """Return what clients call the model: as configured, else the folder's name."""
    if settings.cluster.model:
        return ModelName(settings.cluster.model)
    if settings.model.path == EMBEDDED:
        return ModelName(embedded.SERVED_NAME)
    return ModelName(Path(settings.model.path).expanduser().resolve().name)


def _holding(folder: Path, file: str, setting: str) -> Path:
    if not (folder / file).is_file():
        raise ConfigError(f"{setting}: {folder} holds no {file}")
    return folder
