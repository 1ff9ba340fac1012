"""The command line of the settings: one flag a field, made from the structs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.fields import Group, SettingField, fields, groups
from antiphon.config.sourced_value import Layer, nearest, parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class TypedText(msgspec.Struct, frozen=True):
    """What was typed, and the flag before it, spelled out."""

    text: str
    flag: str


class ParsedFlags(msgspec.Struct, frozen=True):
    """A parsed command line: what was typed, and no default."""

    settings: dict[str, TypedText]
    """By path."""
    implied: dict[str, TypedText]
    """By path: what a typed flag needs beside its own value."""
    plain: dict[str, str]
    """By name: arguments that are no settings, such as `instance`."""

    def layer(self) -> Layer:
        """The settings as values.

        Raises:
            ConfigError: A value is of the wrong type or out of bounds.
        """
        return _layer(self.settings)

    def implied_layer(self) -> Layer:
        """What goes below every other source."""
        return _layer(self.implied)

    def config_file(self) -> Path | None:
        """The file behind `--config`."""
        return Path(self.plain["config"]) if "config" in self.plain else None


IMPLIED = "implied:"
"""Before a path, in a namespace: this value was not typed but follows from what was."""


class Parser(argparse.ArgumentParser):
    """Returns only what was typed, and raises where argparse would print usage and exit."""

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        # Written out, the usage line of all settings fills a screen before the first word of help.
        super().__init__(
            prog, "%(prog)s [ARGUMENT ...]", description, argument_default=argparse.SUPPRESS
        )
        self.refused: dict[str, Mapping[str, str]] = {}
        """By flag of ours: values of SGLang's that are refused, each with its reason."""
        self.foreign: Mapping[str, str] = {}
        """By flag of another server: ours."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`, so that each mistake is told in one line, in one place."""
        raise ConfigError(message)

    def parse(self, argv: Sequence[str]) -> ParsedFlags:
        """Read a command line without the program's name.

        Raises:
            ConfigError: An argument is unknown, ambiguous, refused or lacks its value.
        """
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
        """Read the command line of a command without arguments: at most `--help`.

        Raises:
            ConfigError: There is something else.
        """
        self.usage = "%(prog)s"
        _, rest = self.parse_known_args(list(argv))
        if rest:
            raise ConfigError(f"{rest[0]}: {self.prog} takes no arguments")

    def flags(self) -> frozenset[str]:
        """Every option that was added so far."""
        return frozenset(self._option_string_actions)


class _StoreText(argparse.Action):
    """Keeps the text under the field's path, with the flag as spelled out by argparse."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.dest
        if self.nargs == 0:
            values = "false" if flag.startswith("--no-") else "true"
        assert isinstance(values, str)
        assert isinstance(parser, Parser)
        if (reason := parser.refused.get(flag, {}).get(values)) is not None:
            raise ConfigError(f"{flag} {values}: refused: {reason}")
        before = getattr(namespace, self.dest, None)
        if isinstance(before, TypedText) and not before.flag.startswith("-"):
            raise ConfigError(f"{before.text}: {flag} already sets the model; give one of them")
        setattr(namespace, self.dest, TypedText(values, flag))


def add_settings(
    parser: argparse.ArgumentParser,
    also: Mapping[str, Sequence[str]] = {},
    concerns: Iterable[Group] | None = None,
) -> None:
    """Add a flag for every field but the secrets, grouped.

    Args:
        parser: Where the flags go.
        also: Other names of a field by its path, named in its help.
        concerns: What to add; None is everything in `Settings`.
    """
    for group in groups() if concerns is None else concerns:
        section = parser.add_argument_group(group.name, group.title)
        for field in group.fields:
            if not field.secret:
                _add(section, field, _help(field, also.get(field.path, ())))


def _add(section: argparse._ArgumentGroup, field: SettingField, help_: str) -> None:  # pyright: ignore[reportPrivateUsage]
    if field.kind == "boolean":
        flags = (field.flag, f"--no-{field.flag[2:]}")
        section.add_argument(*flags, dest=field.path, action=_StoreText, nargs=0, help=help_)
    else:
        metavar = _metavar(field)
        section.add_argument(
            field.flag, dest=field.path, action=_StoreText, metavar=metavar, help=help_
        )


def _metavar(field: SettingField) -> str:
    if field.choices:
        return "{" + ",".join(field.choices) + "}"
    return (field.unit or {"integer": "n", "number": "x"}.get(field.kind, "text")).upper()


def _help(field: SettingField, also: Sequence[str]) -> str:
    default = "" if field.default in (None, "") else f"default {field.default}"
    names = f"also {' '.join(also)}" if also else ""
    notes = "; ".join(note for note in (field.bounds, default, names) if note)
    return f"{field.help} [{notes}]".replace("%", "%%") if notes else field.help.replace("%", "%%")


def _sort(namespace: dict[str, object]) -> ParsedFlags:
    typed = ParsedFlags(settings={}, implied={}, plain={})
    for name, value in namespace.items():
        if not isinstance(value, TypedText):
            typed.plain[name] = str(value)
        elif name.startswith(IMPLIED):
            typed.implied[name.removeprefix(IMPLIED)] = value
        else:
            typed.settings[name] = value
    return typed


def _layer(texts: Mapping[str, TypedText]) -> Layer:
    return {path: parse(entry.text, fields()[path], entry.flag) for path, entry in texts.items()}
