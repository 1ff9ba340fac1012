"""The command line of the settings: one flag per field, built from the structs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.fields import SettingField, fields, groups
from antiphon.config.sourced_value import Layer, nearest, parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class TypedText(msgspec.Struct, frozen=True):
    text: str
    flag: str


class ParsedFlags(msgspec.Struct, frozen=True):
    """A parsed command line: typed values only, without defaults."""

    settings: Layer
    implied: Layer
    """Values that a typed flag implies, which every other source overrides."""
    plain: dict[str, str]
    """By name: arguments that are not settings, such as `instance`."""

    @property
    def config_file(self) -> Path | None:
        return Path(self.plain["config"]) if "config" in self.plain else None


IMPLIED = "implied:"
"""Prefix of a path in the namespace: the value was not typed but is implied."""


class Parser(argparse.ArgumentParser):
    """Returns only typed values, and raises where argparse would print usage and exit."""

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        # The full usage line of all settings would fill a screen before the first help text.
        super().__init__(
            prog, "%(prog)s [ARGUMENT ...]", description, argument_default=argparse.SUPPRESS
        )
        self.refused: dict[str, Mapping[str, str]] = {}
        """By Antiphon's flag: rejected values of SGLang's, each with its reason."""
        self.foreign: Mapping[str, str] = {}
        """Antiphon's flags by those of another server."""
        self.described: list[tuple[argparse.Action, SettingField, Sequence[str]]] = []
        """The settings, with their other names, whose help is read when it is printed."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`, so that each mistake is reported in one line, in one place."""
        raise ConfigError(message)

    def format_help(self) -> str:
        for action, field, also in self.described:
            action.help = _help(field, also)
        return super().format_help()

    def parse(self, argv: Sequence[str]) -> ParsedFlags:
        for argument in argv:
            if (ours := self.foreign.get(argument.partition("=")[0])) is not None:
                raise ConfigError(f"{argument}: no such argument; use {ours}")
        namespace, rest = self.parse_known_args(list(argv))
        if rest:
            known = (flag for action in self._actions for flag in action.option_strings)
            typed = rest[0].partition("=")[0]
            raise ConfigError(f"{rest[0]}: no such argument{nearest(typed, known)}")
        return _sort(vars(namespace))

    def parse_none(self, argv: Sequence[str]) -> None:
        """Read the command line of a command without arguments: at most `--help`."""
        self.usage = "%(prog)s"
        _, rest = self.parse_known_args(list(argv))
        if rest:
            raise ConfigError(f"{rest[0]}: {self.prog} takes no arguments")

    def flags(self) -> frozenset[str]:
        return frozenset(self._option_string_actions)


class StoreText(argparse.Action):
    """Stores the text under the field's path, with the full flag as resolved by argparse.

    The model may also be given by position; then its flag must not be.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or str(self.metavar)
        if self.nargs == 0:
            values = "false" if flag.startswith("--no-") else "true"
        assert isinstance(values, str)
        assert isinstance(parser, Parser)
        if (reason := parser.refused.get(flag, {}).get(values)) is not None:
            raise ConfigError(f"{flag} {values}: refused: {reason}")
        before = getattr(namespace, self.dest, None)
        if isinstance(before, TypedText) and not (option_string and before.flag.startswith("-")):
            text, given = (before.text, flag) if option_string else (values, "--model-path")
            raise ConfigError(f"{text}: {given} already sets the model; give one of them")
        setattr(namespace, self.dest, TypedText(values, flag))


def add_settings(parser: Parser, also: Mapping[str, Sequence[str]] = {}) -> None:
    """Add a flag for every field except secrets, in groups; `also` are other names by path."""
    for group in groups():
        section = parser.add_argument_group(group.name, group.title)
        for field in group.fields:
            if not field.secret:
                flags, nargs = [field.flag], None
                if field.kind == "boolean":
                    flags, nargs = [field.flag, f"--no-{field.flag[2:]}"], 0
                action = section.add_argument(
                    *flags, dest=field.path, action=StoreText, nargs=nargs, metavar=_metavar(field)
                )
                parser.described.append((action, field, also.get(field.path, ())))


def _metavar(field: SettingField) -> str:
    if field.choices:
        return "{" + ",".join(field.choices) + "}"
    return (field.unit or {"integer": "n", "number": "x"}.get(field.kind, "text")).upper()


def _help(field: SettingField, also: Sequence[str]) -> str:
    default = "" if field.default in (None, "") else f"default {field.default}"
    names = f"also {' '.join(also)}" if also else ""
    notes = "; ".join(note for note in (field.bounds, default, names) if note)
    return (f"{field.help} [{notes}]" if notes else field.help).replace("%", "%%")


def _sort(namespace: dict[str, object]) -> ParsedFlags:
    typed = ParsedFlags(settings={}, implied={}, plain={})
    for name, value in namespace.items():
        if not isinstance(value, TypedText):
            typed.plain[name] = str(value)
            continue
        path = name.removeprefix(IMPLIED)
        layer = typed.settings if path == name else typed.implied
        layer[path] = parse(value.text, fields()[path], value.flag)
    return typed
