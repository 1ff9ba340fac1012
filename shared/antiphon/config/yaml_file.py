"""Settings as a YAML file: groups of fields, or the flat keys of SGLang's files."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING, cast

import msgspec
import yaml

from antiphon.config.errors import ConfigError
from antiphon.config.fields import SettingField, fields, groups, value_at
from antiphon.config.sglang.aliases import rows_by_key, translate
from antiphon.config.sourced_value import Layer, SourcedValue, nearest, parse, refusal

if TYPE_CHECKING:
    from antiphon.config.settings import Settings
    from antiphon.config.sglang.arguments import SglangArgument


def read_yaml(path: Path) -> Layer:
    try:
        tree: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    known = {group.name for group in groups()}
    flat = rows_by_key()
    implied: Layer = {}
    layer: Layer = {}
    for key, value in _mapping(tree, f"{path}").items():
        row = flat.get(key.replace("_", "-"))
        if row is not None and not (key in known and _is_mapping(value)):
            above, below = _flat(row, key, value, path)
            layer |= above
            implied |= below
            continue
        if key not in known:
            guess = nearest(key, known | flat.keys())
            raise ConfigError(f"{path}: {key}: no such group or argument{guess}")
        for name, member in _mapping(value, f"{path}: {key}").items():
            field = _field(f"{key}.{name}", path)
            layer[field.path] = _given(member, field, path)
    return implied | layer


def write_yaml(settings: Settings, path: Path) -> None:
    """Write all settings except secrets, readable by this user only; `load` reads them back.

    The write is atomic: a concurrent reader gets the old or the new contents.
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
    """Format all settings except secrets."""
    tree = {
        group.name: {
            field.name: value_at(settings, field) for field in group.fields if not field.secret
        }
        for group in groups()
    }
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _flat(row: SglangArgument, key: str, value: object, file: Path) -> tuple[Layer, Layer]:
    """Translate one of SGLang's keys to the values that it sets and implies."""
    if value is None or value == [] or (value is False and row.takes == "switch"):
        return {}, {}
    source = f"{file}: {key}"
    written = translate(row, source, _text(value, row))
    layer: Layer = {}
    if row.path is not None and written.text is not None:
        layer[row.path] = parse(written.text, fields()[row.path], source)
    implied = {path: parse(text, fields()[path], source) for path, text in written.implied.items()}
    return layer, implied


def _text(value: object, row: SglangArgument) -> str:
    """Format a YAML value as on the command line."""
    if value is True and row.takes == "switch":
        return ""
    if isinstance(value, list) and row.takes[-1] in "+*":
        return " ".join(_text(item, row) for item in cast("list[object]", value))
    if isinstance(value, bool | list | dict):
        return msgspec.json.encode(value).decode()
    return str(value)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _mapping(tree: object, where: str) -> dict[str, object]:
    if tree is None:
        return {}
    try:
        return msgspec.convert(tree, dict[str, object])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: must be a mapping of names to values") from error


def _field(path: str, file: Path) -> SettingField:
    known = fields()
    if path not in known:
        raise ConfigError(f"{file}: {path}: no such setting{nearest(path, known)}")
    return known[path]


def _given(value: object, field: SettingField, file: Path) -> SourcedValue:
    if field.secret:
        # Files are copied, mounted and committed.
        raise ConfigError(
            f"{file}: {field.path}: secrets are not read from files; set {field.variable}"
        )
    if value is None or isinstance(value, str | int | float | bool):
        return SourcedValue(value, str(file))
    raise refusal(field, value, str(file))
