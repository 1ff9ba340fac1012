"""A digest of what an encoder reads of a model: it stands for the tower in keys."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_CONFIG: Final = "config.json"
_PROCESSORS: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def tower_digest(folder: Path) -> str:
    """SHA-256 over names and bytes of config, preprocessors and weights. Reads all of them.

    Raises:
        ConfigError: There is no config, or no weights, or a file cannot be read.
    """
    processors = [folder / name for name in _PROCESSORS if (folder / name).exists()]
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"{folder}: there is no .safetensors file")
    content = hashlib.sha256()
    try:
        for file in (folder / _CONFIG, *processors, *weights):
            with file.open("rb") as stream:
                inner = hashlib.file_digest(stream, "sha256").hexdigest()
            content.update(f"{file.name}\0{inner}\n".encode())
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return content.hexdigest()
