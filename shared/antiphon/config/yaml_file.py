"""Settings as a file: groups of fields."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING

import msgspec
import yaml

from antiphon.config.errors import ConfigError
from antiphon.config.fields import Field, fields, groups, value_at
from antiphon.config.given import Given, Layer, nearest, refusal

if TYPE_CHECKING:
    from antiphon.config.settings import Settings


def read_yaml(path: Path) -> Layer:
    """Read what a file sets.

    Raises:
        ConfigError: The file cannot be read, names what does not exist, or holds a secret.
    """
    try:
        tree: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    known = {group.name for group in groups()}
    layer: Layer = {}
    for group, members in _mapping(tree, f"{path}").items():
        if group not in known:
            raise ConfigError(f"{path}: {group}: no such group{nearest(group, known)}")
        for name, value in _mapping(members, f"{path}: {group}").items():
            field = _field(f"{group}.{name}", path)
            layer[field.path] = _given(value, field, path)
    return layer


def write_yaml(settings: Settings, path: Path) -> None:
    """Write all but secrets, readable by this user only; `load` reads back the same.

    Whoever reads meanwhile reads all of it, or all of what was there before.
    """
    text = yaml_text(settings)
    descriptor, new = mkstemp(prefix=f".{path.name}.", dir=path.parent)  # with mode 600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(new).replace(path)
    except BaseException:
        Path(new).unlink()
        raise


def yaml_text(settings: Settings) -> str:
    """Format all but secrets."""
    tree = {
        group.name: {
            field.name: value_at(settings, field) for field in group.fields if not field.secret
        }
        for group in groups()
    }
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _mapping(tree: object, where: str) -> dict[str, object]:
    if tree is None:
        return {}
    try:
        return msgspec.convert(tree, dict[str, object])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: must be a mapping of names to values") from error


def _field(path: str, file: Path) -> Field:
    known = fields()
    if path not in known:
        raise ConfigError(f"{file}: {path}: no such setting{nearest(path, known)}")
    return known[path]


def _given(value: object, field: Field, file: Path) -> Given:
    if field.secret:
        # Files are copied, mounted and committed.
        raise ConfigError(f"{file}: {field.path}: a secret comes by {field.variable} only")
    if value is None or isinstance(value, str | int | float | bool):
        return Given(value, str(file))
    raise refusal(field, value, str(file))
