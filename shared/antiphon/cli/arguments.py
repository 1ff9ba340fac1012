"""Command line of `antiphon serve` and `antiphon config`: all settings, and SGLang's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.load import Loaded, load
from antiphon.config.sglang.aliases import serve_parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def load_arguments(prog: str, description: str, argv: Sequence[str]) -> Loaded:
    """Load the settings from all sources; arguments take precedence. `--help` raises SystemExit."""
    parsed = serve_parser(prog, description).parse(argv)
    return load(parsed.config_file, parsed.settings, implied=parsed.implied)
