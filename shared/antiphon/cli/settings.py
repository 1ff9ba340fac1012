"""`antiphon config`: the effective settings and their sources; `serve` loads them the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from antiphon.config.fields import SettingField, fields, value_at
from antiphon.config.flags import Parser
from antiphon.config.load import Loaded, load
from antiphon.config.sglang_arguments import arguments, serve_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

PIPE_COLUMNS = 200
"""Width without a terminal; a narrower table would fold paths and break `grep`."""


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "arguments":
        return _arguments(argv[1:])
    summary = (
        "Print the settings that `antiphon serve` would use with the same arguments. "
        "`antiphon config arguments` lists SGLang's arguments instead."
    )
    loaded = load_arguments("antiphon config", summary, argv)
    table = _table("setting", "value", "source")
    for field in fields().values():
        given = loaded.given.get(field.path)
        source, style = ("default", "dim") if given is None else (given.source, "")
        table.add_row(field.path, Text(_shown(loaded, field)), source, style=style)
    _print(table)
    return 0


def _arguments(argv: Sequence[str]) -> int:
    parser = Parser("antiphon config arguments", "List SGLang's arguments with their status.")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    if parser.parse(argv).plain.get("json"):
        print(msgspec.json.format(msgspec.json.encode(arguments())).decode())
        return 0
    table = _table("argument", "status", "reason")
    for argument in arguments():
        table.add_row(argument.flags[0], argument.status, Text(argument.reason))
    _print(table)
    return 0


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _print(table: Table) -> None:
    console = Console()
    console.print(table, width=None if console.is_terminal else PIPE_COLUMNS)


def _shown(loaded: Loaded, field: SettingField) -> str:
    value = value_at(loaded.settings, field)
    if field.secret and value:
        return "***"
    return "unset" if value is None else str(value)


def load_arguments(prog: str, description: str, argv: Sequence[str]) -> Loaded:
    """Load the settings from all sources; arguments take precedence. `--help` raises SystemExit."""
    parsed = serve_parser(prog, description).parse(argv)
    return load(parsed.config_file, parsed.settings, implied=parsed.implied)
