"""`antiphon config`: the settings in force, and the source of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from antiphon.cli.arguments import load_arguments
from antiphon.config.fields import Field, fields, value_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.config.load import Loaded

PIPE_COLUMNS = 200
"""Width where there is no terminal; narrower ones would fold paths that somebody greps."""


def main(argv: Sequence[str]) -> int:
    """Print a line a setting."""
    summary = "Print the settings that `antiphon serve` would run with, given the same arguments."
    loaded = load_arguments("antiphon config", summary, argv)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("setting", "value", "source"):
        table.add_column(name, overflow="fold")
    for field in fields().values():
        style = "" if field.path in loaded.given else "dim"
        table.add_row(field.path, Text(_shown(loaded, field)), _source(loaded, field), style=style)
    console = Console()
    console.print(table, width=None if console.is_terminal else PIPE_COLUMNS)
    return 0


def _shown(loaded: Loaded, field: Field) -> str:
    value = value_at(loaded.settings, field)
    if field.secret and value:
        return "***"
    return "unset" if value is None else str(value)


def _source(loaded: Loaded, field: Field) -> str:
    return loaded.given[field.path].source if field.path in loaded.given else "default"
