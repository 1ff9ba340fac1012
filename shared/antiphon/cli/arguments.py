"""The command line of `antiphon serve` and `antiphon config`: every setting, and SGLang's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.load import Loaded, load
from antiphon.config.sglang.aliases import serve_parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def load_arguments(prog: str, description: str, argv: Sequence[str]) -> Loaded:
    """Read the settings from every source, the arguments last.

    Raises:
        ConfigError: Anything is unknown, refused, of the wrong type or out of bounds.
        SystemExit: `--help` was asked for and printed.
    """
    typed = serve_parser(prog, description).parse(argv)
    return load(typed.config_file(), typed.layer(), implied=typed.implied_layer())
