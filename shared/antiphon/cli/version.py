"""`antiphon version`."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from antiphon.config.flags import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Print the installed version."""
    Parser("antiphon version", "Print the version.").parse_none(argv)
    print(metadata.version("antiphon"))
    return 0
