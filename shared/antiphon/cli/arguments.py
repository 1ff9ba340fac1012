"""Command line of `antiphon serve` and `antiphon config`: all settings, and SGLang's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.load import Loaded, load
from antiphon.config.sglang.aliases import serve_parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def load_arguments(prog: str, description: str, argv: Sequence[str]) -> Loaded:
    """Load the settings from all sources; arguments take precedence.

    Raises:
        ConfigError: An argument or setting is unknown, unsupported, of the wrong type or out of
            bounds.
        SystemExit: `--help` was given and printed.
    """
    parsed = serve_parser(prog, description).parse(argv)
    return load(parsed.config_file(), parsed.layer(), implied=parsed.implied_layer())
