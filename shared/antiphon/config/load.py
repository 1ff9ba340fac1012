"""Loads the settings of a process: defaults < YAML < environment < flags; and writes them as YAML.

Layers are merged as values by path, each with its source, and converted once. Only this module
reads the environment. A file has groups of fields, or the flat keys of SGLang's files.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkstemp
from typing import NoReturn, cast

import msgspec
import yaml

from antiphon.config.errors import ConfigError
from antiphon.config.fields import SettingField, fields, groups, value_at
from antiphon.config.flags import Parser, add_settings
from antiphon.config.settings import Settings
from antiphon.config.sglang_arguments import SglangArgument, rows_by_key, translate
from antiphon.config.sourced_value import Layer, SourcedValue, Value, nearest, parse, refusal


class Loaded(msgspec.Struct, frozen=True):
    """Settings, and the source of each value that is not a default."""

    settings: Settings
    given: Mapping[str, SourcedValue]


class ProcessArguments(msgspec.Struct, frozen=True):
    settings: Settings
    instance: str
    parent_pid: int | None
    """Process id of the supervisor: when it dies, this process exits."""


def load_process(argv: Sequence[str] | None = None) -> ProcessArguments:
    """Read one service's settings; `argv` lacks the program's name. `--help` raises SystemExit."""
    parser = Parser(description="Start one service of an Antiphon cluster.")
    for flag, metavar, text in (
        ("--config", "FILE", "YAML file with settings"),
        ("--instance", "NAME", "name of this process; unset: host name and process ID"),
        ("--parent-pid", "PID", "process ID; exit when that process exits"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    add_settings(parser)
    typed = parser.parse(sys.argv[1:] if argv is None else argv)
    return ProcessArguments(
        settings=load(typed.config_file, typed.settings).settings,
        instance=typed.plain.get("instance") or f"{socket.gethostname()}-{os.getpid()}",
        parent_pid=_pid(typed.plain.get("parent_pid")),
    )


def load(
    file: Path | None = None,
    flags: Layer | None = None,
    *,
    implied: Layer | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Merge all sources and validate the result once.

    `implied` are values that typed flags imply: any other source overrides them. `environ` replaces
    the process's environment in tests.
    """
    given = (
        (implied or {})
        | (read_yaml(file) if file else {})
        | read_environment(os.environ if environ is None else environ)
        | (flags or {})
    )
    return Loaded(settings=_convert(given), given=given)


def read_environment(environ: Mapping[str, str]) -> Layer:
    """Read `ANTIPHON_<GROUP>__<FIELD>`.

    Names without the double underscore are ignored, not rejected: for a service named
    `antiphon-gateway`, Kubernetes itself sets ANTIPHON_GATEWAY_PORT to `tcp://...`.
    """
    known = {field.variable: field for field in fields().values()}
    layer: Layer = {}
    for name, text in environ.items():
        if not name.startswith("ANTIPHON_") or "__" not in name:
            continue
        if name not in known:
            raise ConfigError(f"{name}: no such setting{nearest(name, known)}")
        layer[known[name].path] = parse(text, known[name], name)
    return layer


def child_environment(settings: Settings) -> dict[str, str]:
    """The environment of a process that is started with these settings as its file.

    Antiphon's variables are left out, or they would override flags that are merged into the file
    already; secrets are added, since no file contains them.
    """
    known = {field.variable for field in fields().values()}
    environ = {name: text for name, text in os.environ.items() if name not in known}
    for field in fields().values():
        if field.secret and (secret := value_at(settings, field)):
            environ[field.variable] = str(secret)
    return environ


def nats_server() -> str:
    """The path of nats-server in the one variable that is not a setting; empty: unset."""
    return os.environ.get("ANTIPHON_NATS_SERVER", "")


def _convert(given: Layer) -> Settings:
    tree: dict[str, dict[str, Value]] = {}
    for path, entry in given.items():
        field = fields()[path]
        if isinstance(entry.value, float) and not math.isfinite(entry.value):
            raise refusal(field, entry.value, entry.source)
        tree.setdefault(field.group, {})[field.name] = entry.value
    try:
        return msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        _blame(error, given)


def _blame(error: msgspec.ValidationError, given: Layer) -> NoReturn:
    reason, _, place = str(error).partition(" - at `$.")
    path = place.rstrip("`")
    if path in given:
        raise refusal(fields()[path], given[path].value, given[path].source) from error
    # A check across fields: the message names every source that set a field of the group.
    sources = {entry.source for at, entry in given.items() if at.startswith(f"{path}.")}
    raise ConfigError(f"{', '.join(sorted(sources))}: {path}: {reason}") from error


def _pid(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--parent-pid: {text!r}: must be a process ID, an integer >= 1")
    return int(text)


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
            setting = f"{key}.{name}"
            if setting not in fields():
                guess = nearest(setting, fields())
                raise ConfigError(f"{path}: {setting}: no such setting{guess}")
            layer[setting] = _given(member, fields()[setting], path)
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
    tree: dict[str, dict[str, Value]] = {}
    for field in fields().values():
        if not field.secret:
            tree.setdefault(field.group, {})[field.name] = value_at(settings, field)
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


def _given(value: object, field: SettingField, file: Path) -> SourcedValue:
    if field.secret:
        # Files are copied, mounted and committed.
        raise ConfigError(
            f"{file}: {field.path}: secrets are not read from files; set {field.variable}"
        )
    if value is None or isinstance(value, str | int | float | bool):
        return SourcedValue(value, str(file))
    raise refusal(field, value, str(file))
