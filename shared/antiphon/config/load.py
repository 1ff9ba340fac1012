"""Loads the settings of a process: defaults < YAML < environment < flags.

Layers are merged as values by path, each with its source, and converted once. Only this module
reads the environment.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields, value_at
from antiphon.config.flags import Parser, add_settings
from antiphon.config.settings import Settings
from antiphon.config.sourced_value import Layer, SourcedValue, Value, nearest, parse, refusal
from antiphon.config.yaml_file import read_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    parser.add_argument(
        "--instance", metavar="NAME", help="name of this process; unset: host name and process ID"
    )
    parser.add_argument(
        "--parent-pid", metavar="PID", help="process ID; exit when that process exits"
    )
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
        secret = value_at(settings, field) if field.secret else None
        if secret:
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
