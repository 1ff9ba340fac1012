"""`antiphon version`."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Print the installed version."""
    if argv:
        raise ConfigError(f"{argv[0]}: version takes no arguments")
    print(metadata.version("antiphon"))
    return 0
