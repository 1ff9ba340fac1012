"""The console script `antiphon`: a table of commands, and error reporting in one place."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.sourced_value import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Command(msgspec.Struct, frozen=True):
    """A subcommand. `target` is imported only when called, so that each command starts fast."""

    target: str
    summary: str

    def load(self) -> Callable[[Sequence[str]], int]:
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


COMMANDS = {
    "serve": Command("antiphon.cli.serve:main", "start NATS and every service on this machine"),
    "chat": Command("antiphon.cli.chat:main", "chat with a running server in the terminal"),
    "drain": Command("antiphon.cli.drain:main", "move the requests of a worker to others"),
    "models": Command("antiphon.cli.commands:models", "list models with a short name"),
    "config": Command("antiphon.cli.settings:main", "print the settings and their sources"),
    "replay": Command("antiphon.cli.commands:replay", "replay the recorded step plans of a worker"),
    "version": Command("antiphon.cli.commands:version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 2 for an error in the settings."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in {"-h", "--help"}:
        print(usage())
        return 0
    if name in {"-V", "--version"}:
        name = "version"
    try:
        return _command(name).load()(rest)
    except ConfigError as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: antiphon COMMAND ...", "", *lines, "", "Run antiphon COMMAND --help for details."]
    )


def _command(name: str) -> Command:
    if name not in COMMANDS:
        raise ConfigError(f"{name}: no such command{nearest(name, COMMANDS)}")
    return COMMANDS[name]


if __name__ == "__main__":
    sys.exit(main())
