"""The short commands: `antiphon models`, `antiphon replay` and `antiphon version`."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from antiphon import embedded
from antiphon.config.flags import Parser
from antiphon.model_card.packaged import MODELS

if TYPE_CHECKING:
    from collections.abc import Sequence


def models(argv: Sequence[str]) -> int:
    summary = "List models with a short name, with size, licence and source."
    Parser("antiphon models", summary).parse_none(argv)
    rows = [("NAME", "MODEL", "SIZE", "LICENCE", "SOURCE")]
    own_bytes = sum(file.stat().st_size for file in embedded.path().iterdir() if file.is_file())
    for name, model in MODELS.items():
        size = model.size_bytes or own_bytes
        rows.append((name, model.title, f"{size / 1e6:.0f} MB", model.license, model.source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print("\nantiphon serve --model-path NAME")
    return 0


def replay(argv: Sequence[str]) -> int:
    """Replay the recorded step plans of a worker in a child: only workers load models."""
    command = [sys.executable, "-m", "antiphon.model_worker.observability.replay", *argv]
    return subprocess.call(command)  # noqa: S603  # our own module, with the operator's arguments


def version(argv: Sequence[str]) -> int:
    Parser("antiphon version", "Print the version.").parse_none(argv)
    print(metadata.version("antiphon"))
    return 0
