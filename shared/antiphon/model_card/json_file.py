from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")


def read_json(file: Path, type_: type[T]) -> T:
    try:
        return parse_json(file.read_bytes(), type_, file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def parse_json(content: bytes | str | msgspec.Raw, type_: type[T], source: object) -> T:
    """Decode JSON; the error begins with its source."""
    try:
        return msgspec.json.decode(content, type=type_)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: {error}") from error
